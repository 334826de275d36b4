"""Recording a program in which the ranks of one mesh axis hold shares of their own of a dynamic size.

It is the program for a size that the axis does not divide, in which a rank's place in the whole is its coordinate times
the block of a rank: here a rank's share stands for the block, and what the ranks before it hold for that product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.program._torch import FakeTensorMode
from autoshard.program.emitter import GraphEmitter
from autoshard.size import DynamicSize, Sizes
from autoshard.specs.axes import MeshShape
from autoshard.specs.shared_axis import SharedAxis

aten = torch.ops.aten


class SharesEmitter(GraphEmitter):
    """A `GraphEmitter` for a mesh with a shared axis.

    Args:
        mesh, groups, mode, home: as of `GraphEmitter`.
        sizes: the values of all symbols but those of shares.
        shared: the axis.
    """

    def __init__(
        self,
        mesh: MeshShape,
        groups: Sequence[str],
        mode: FakeTensorMode,
        home: torch.device,
        sizes: Sizes,
        shared: SharedAxis,
    ) -> None:
        self.sizes = shared.example(sizes)
        super().__init__(mesh, groups, mode, home, self.sizes)
        self.shared = shared
        self._share_expressions: set[Any] = set()  # expressions that speak of shares themselves
        self._coordinate_nodes: set[fx.Node] = set()  # nodes that follow from the rank's coordinate alone

    def share(self, expr: Any) -> int:
        """A number of a program, given as an expression in the symbols of the shares."""
        self._share_expressions.add(expr)
        return DynamicSize.of(expr, self.sizes)

    def placeholder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> fx.Node:
        return super().placeholder(name, self.shape_with_shares(shape), dtype, device)

    def shape_with_shares(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A local shape with a rank's share in place of a block."""
        try:
            return tuple(map(self._with_share, shape))
        except ValueError as error:
            raise self._unequal_shares_error("a tensor", error) from error

    def _with_share(self, value: Any) -> Any:
        trusted = isinstance(value, DynamicSize) and value.expr in self._share_expressions
        return value if trusted else self.shared.with_share(value, self.sizes)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._with_share)
        except ValueError as error:
            raise self._unequal_shares_error(op, error) from error
        scaled = self._has_share((args, kwargs))
        if scaled and op == aten.mul.Tensor and args[0] in self._shared_coordinates():
            return self._share_start(args[1], self.device(args[0]))
        operands: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), operands.append)
        places = self._is_coordinate_based(operands)
        moves = self._groups[self.shared.axis] in (*args, *kwargs.values())
        if (places and scaled) or (moves and any(self.shared.is_shared(self.shape(one)) for one in operands)):
            raise self._unequal_shares_error(op, "it moves what lies in shares, or counts in blocks")
        made = super().call(op, *args, **kwargs)
        if places:
            self._coordinate_nodes.update(made if isinstance(made, tuple) else (made,))
        return made

    def _shared_coordinates(self) -> tuple[fx.Node, fx.Node]:
        """The rank's coordinate on the shared axis, on its device and on the host."""
        return self.coordinate(self.shared.axis), self.host_coordinate(self.shared.axis)

    def _share_start(self, steps: DynamicSize, device: torch.device) -> fx.Node:
        """Where a rank's share of a dim begins, given its length there: what would be coordinate times block."""
        start = self.share(steps.expr / self.shared.own_share * self.shared.share_before)
        node: fx.Node = super().call(aten.full.default, [], start, dtype=torch.int64, device=device)
        return node

    def _is_coordinate_based(self, operands: Sequence[fx.Node]) -> bool:
        """Whether what is made of these follows from the coordinates alone, that on the shared axis among them."""
        own = {*self._shared_coordinates(), *self._coordinate_nodes}
        every = own.union(self._coordinates, self._host_coordinates)
        return not own.isdisjoint(operands) and every.issuperset(operands)

    def _has_share(self, arguments: Any) -> bool:
        """Whether a number among the arguments is a rank's share, or a multiple of it."""
        numbers: list[Any] = []
        fx.node.map_aggregate(arguments, numbers.append)
        return self.shared.is_shared(numbers)

    def _unequal_shares_error(self, op: Any, why: object) -> PlanError:
        axis = self.mesh.names[self.shared.axis]
        return PlanError(
            f"axis {axis!r} shares {self.shared.whole} unevenly, and {op} of this plan needs equal shares: {why}. "
            f"Plan with the same shares, pin nothing along {axis!r} but to shares of {self.shared.whole}, or leave the "
            "shares out."
        )
