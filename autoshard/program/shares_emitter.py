"""A rank's program in which the ranks of one mesh axis hold unequal shares of a dynamic size.

It is the program for a size that the axis does not divide, in which a rank's block begins at its coordinate times the
block's size. The rank's share replaces that size, and the sum of the shares before it replaces that product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.program._torch import FakeTensorMode
from autoshard.program.graph_emitter import GraphEmitter
from autoshard.size import DynamicSize, Sizes
from autoshard.specs.axes import MeshShape
from autoshard.specs.shared_axis import SharedAxis

aten = torch.ops.aten


class SharesEmitter(GraphEmitter):
    """A `GraphEmitter` for a mesh with a shared axis; `sizes` are the values of all symbols but those of shares."""

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
        self._share_expressions: set[Any] = set()  # expressions in shares: no share replaces a block in them
        self._coordinate_nodes: set[fx.Node] = set()  # nodes that depend on coordinates alone

    def share(self, expr: Any) -> int:
        """Return the number of a program that an expression in the symbols of shares stands for."""
        self._share_expressions.add(expr)
        return DynamicSize.of(expr, self.sizes)

    def placeholder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> fx.Node:
        return super().placeholder(name, self.shape_with_shares(shape), dtype, device)

    def shape_with_shares(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a local shape with a rank's share in place of a block."""
        try:
            return tuple(map(self._with_share, shape))
        except ValueError as error:
            raise self._unequal_shares_error("a tensor", error) from error

    def _with_share(self, value: Any) -> Any:
        is_share = isinstance(value, DynamicSize) and value.expr in self._share_expressions
        return value if is_share else self.shared.with_share(value, self.sizes)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        # Blocks become shares before the operator is recorded.
        try:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._with_share)
        except ValueError as error:
            raise self._unequal_shares_error(op, error) from error
        # A number among the arguments is a rank's share, or a multiple of it.
        numbers: list[Any] = []
        fx.node.map_aggregate((args, kwargs), numbers.append)
        scaled = self.shared.is_shared(numbers)
        # Coordinate times block, with the share in the block's place: where the rank's share begins.
        if scaled and op == aten.mul.Tensor and args[0] in self._shared_coordinates():
            return self._share_start(args[1], self.device(args[0]))
        operands: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), operands.append)
        places = self._is_coordinate_based(operands)
        # A collective along the axis wants blocks of one size from all ranks.
        moves = self._groups[self.shared.axis] in (*args, *kwargs.values())
        if (places and scaled) or (moves and any(self.shared.is_shared(self.shape(node)) for node in operands)):
            raise self._unequal_shares_error(op, "it moves what lies in shares, or counts in blocks")
        results = super().call(op, *args, **kwargs)
        if places:
            self._coordinate_nodes.update(results if isinstance(results, tuple) else (results,))
        return results

    def _shared_coordinates(self) -> tuple[fx.Node, fx.Node]:
        """Return the rank's coordinate on the shared axis, on its device and on the host."""
        return self.coordinate(self.shared.axis), self.host_coordinate(self.shared.axis)

    def _share_start(self, steps: DynamicSize, device: torch.device) -> fx.Node:
        """Return where a rank's share of a dim begins, given its length there."""
        start = self.share(steps.expr / self.shared.own_share * self.shared.share_before)
        node: fx.Node = super().call(aten.full.default, [], start, dtype=torch.int64, device=device)
        return node

    def _is_coordinate_based(self, operands: Sequence[fx.Node]) -> bool:
        """Return True if operands depend on coordinates alone, that on the shared axis among them."""
        shared = {*self._shared_coordinates(), *self._coordinate_nodes}
        coordinates = shared.union(self._coordinates, self._host_coordinates)
        return not shared.isdisjoint(operands) and coordinates.issuperset(operands)

    def _unequal_shares_error(self, op: Any, why: object) -> PlanError:
        axis = self.mesh.names[self.shared.axis]
        return PlanError(
            f"axis {axis!r} shares {self.shared.whole} unevenly, and {op} of this plan needs equal shares: {why}. "
            f"Plan with the same shares, pin nothing along {axis!r} but to shares of {self.shared.whole}, or leave the "
            "shares out."
        )
