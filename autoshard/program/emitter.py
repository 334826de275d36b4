"""Recording a rank's program: local operators become nodes of an FX graph, with the shapes of local tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.program._torch import FakeTensorMode
from autoshard.program.memory_order import supports_layout
from autoshard.program.symbolic import SymbolicShapes
from autoshard.size import Sizes, plain
from autoshard.specs.axes import MeshShape


class GraphEmitter:
    """An `Emitter` whose values are FX nodes. Shapes are found by running operators on fake tensors, equal calls once.

    Args:
        mesh: the mesh axes.
        groups: for every axis, the name of the process group of this rank's line along it.
        mode: the fake mode that the captured graph's tensors belong to.
        home: the device of the program's tensors.
        sizes: where sizes are dynamic, those that the fake tensors have. What depends on them stands as `Size`s and
            `Ratio`s in the graph's arguments.
    """

    def __init__(
        self,
        mesh: MeshShape,
        groups: Sequence[str],
        mode: FakeTensorMode,
        home: torch.device,
        sizes: Sizes | None = None,
    ) -> None:
        self.mesh = mesh
        self.graph = fx.Graph()
        self.phase = "forward"
        self._groups = tuple(groups)
        self._mode = mode
        self.home = home
        self.streams = 0  # how many random operators were emitted: each has a number
        self._coordinates: list[fx.Node] = []
        self._host_coordinates: list[fx.Node] = []
        self._seed: fx.Node | None = None
        self._symbolic = SymbolicShapes(sizes) if sizes else None
        self._results: dict[tuple[Any, ...], Any] = {}  # fake tensors, which equal calls of an operator share

    def placeholder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> fx.Node:
        """An input of the program, with its local shape; by default on the program's device."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty([int(size) for size in shape], dtype=dtype, device=device or self.home)
        if self._symbolic is not None:
            self._symbolic.placeholder(node, shape)
        return node

    def add_rank_inputs(self) -> None:
        """Take what `Ranks.arguments` gives as the next inputs of the program."""
        host = torch.device("cpu")
        self._coordinates = [self.placeholder(f"coordinate_{name}", (), torch.int64) for name in self.mesh.names]
        self._host_coordinates = [
            self.placeholder(f"host_coordinate_{name}", (), torch.int64, host) for name in self.mesh.names
        ]
        self._seed = self.placeholder("seed", (), torch.int64, host)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = fx.node.map_arg((args, kwargs), lambda operand: self._in_supported_layout(op, operand))
        node = self.graph.call_function(op, args, kwargs)
        val = self._result(op, args, kwargs)
        self._finish(node, val)
        if self._symbolic is not None:
            self._symbolic.run(node, op, args, kwargs)
            node.meta["dynamic"] = self._symbolic.has_dynamic_size(node)
        if isinstance(val, (tuple, list)):
            return tuple(self._item(node, index, item) for index, item in enumerate(val))
        return node

    def _in_supported_layout(self, op: Any, operand: fx.Node) -> fx.Node:
        """The operand, or a copy of it in the order of memory that an operator wants."""
        val = operand.meta["val"]
        if not isinstance(val, torch.Tensor) or supports_layout(op, val):
            return operand
        copy: fx.Node = self.call(torch.ops.aten.clone.default, operand, memory_format=torch.contiguous_format)
        return copy

    def _result(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (op, _cache_key(args), _cache_key(kwargs))
        if key not in self._results:
            fakes = fx.node.map_aggregate((args, kwargs), _fake)
            with self._mode, torch.no_grad():
                self._results[key] = op(*fakes[0], **fakes[1])
        return self._results[key]

    def _item(self, node: fx.Node, index: int, val: Any) -> fx.Node | None:
        if not isinstance(val, torch.Tensor):
            return None  # numbers among the results are known before the program runs
        item = self.graph.call_function(operator.getitem, (node, index))
        self._finish(item, val)
        if self._symbolic is not None:
            self._symbolic.item(item, node, index)
            item.meta["dynamic"] = self._symbolic.has_dynamic_size(item)
        return item

    def _finish(self, node: fx.Node, val: Any) -> None:
        node.meta["val"] = val
        node.meta["partitioner_tag"] = f"is_{self.phase}"

    def coordinate(self, axis: int) -> fx.Node:
        return self._coordinates[axis]

    def host_coordinate(self, axis: int) -> fx.Node:
        return self._host_coordinates[axis]

    def group(self, axis: int) -> str:
        return self._groups[axis]

    def seed(self) -> fx.Node:
        assert self._seed is not None, "ranks() comes before the first operator"
        return self._seed

    def stream(self) -> int:
        self.streams += 1
        return self.streams

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        return tuple(value.meta["val"].shape) if self._symbolic is None else self._symbolic.shape(value)

    def dtype(self, value: fx.Node) -> torch.dtype:
        dtype: torch.dtype = value.meta["val"].dtype
        return dtype

    def device(self, value: fx.Node) -> torch.device:
        device: torch.device = value.meta["val"].device
        return device

    def is_contiguous(self, value: fx.Node) -> bool:
        """Whether the value lies row-major in memory, by the strides of the fake tensor."""
        return bool(value.meta["val"].is_contiguous())


def _fake(argument: Any) -> Any:
    """What stands for an argument when shapes are found."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else plain(argument)


def _cache_key(argument: Any) -> Any:
    """What of an argument decides how the results look."""
    if isinstance(argument, dict):
        return tuple((name, _cache_key(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(map(_cache_key, argument))
    value = _fake(argument)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return _cache_key(value) if isinstance(value, (list, tuple)) else (type(value), value)
