"""A rank's program as an FX graph: every local operator is a node with the shape of its local tensor."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.program._torch import FakeTensorMode
from autoshard.program.symbolic import SymbolicShapes
from autoshard.size import Sizes, plain
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten


class GraphEmitter:
    """An `Emitter` whose values are FX nodes. Shapes are found by running operators on fake tensors, equal calls once.

    Args:
        mesh: the mesh axes.
        groups: for every axis, the name of the process group of this rank's line along it.
        mode: the fake mode that the captured graph's tensors belong to.
        home: the device of the program's tensors.
        sizes: where sizes are dynamic, those that the fake tensors have. Numbers that depend on them stand as
            `DynamicSize`s and `Ratio`s in the graph's arguments.
        results: the fake tensors of calls that were run before, for emitters that share them.
    """

    def __init__(
        self,
        mesh: MeshShape,
        groups: Sequence[str],
        mode: FakeTensorMode,
        home: torch.device,
        sizes: Sizes | None = None,
        results: dict[Hashable, Any] | None = None,
    ) -> None:
        self.mesh = mesh
        self.graph = fx.Graph()
        self.phase = "forward"
        self.home = home
        # The count of random operators so far. Each has a number, so that it draws numbers of its own.
        self.streams = 0
        self._groups = tuple(groups)
        self._mode = mode
        self._coordinates: list[fx.Node] = []
        self._host_coordinates: list[fx.Node] = []
        self._seed: fx.Node | None = None
        self._symbolic = SymbolicShapes(sizes) if sizes else None
        # Equal calls of an operator share their fake tensors.
        self._results: dict[Hashable, Any] = {} if results is None else results

    def placeholder(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
    ) -> fx.Node:
        """Add an input of the program, with its local shape; by default on the program's device."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty([int(size) for size in shape], dtype=dtype, device=device or self.home)
        if self._symbolic is not None:
            self._symbolic.placeholder(node, shape)
        return node

    def add_rank_inputs(self) -> None:
        """Add the inputs that `Ranks.arguments` gives."""
        host = torch.device("cpu")
        self._coordinates = [self.placeholder(f"coordinate_{name}", (), torch.int64) for name in self.mesh.names]
        # Coordinates and seed on the host are read there without waiting for the device.
        self._host_coordinates = [
            self.placeholder(f"host_coordinate_{name}", (), torch.int64, host) for name in self.mesh.names
        ]
        self._seed = self.placeholder("seed", (), torch.int64, host)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = fx.node.map_arg((args, kwargs), lambda operand: self._in_supported_layout(op, operand))
        node = add_call(self.graph, op, args, kwargs)
        val = self._result(op, args, kwargs)
        self._finish(node, val)
        if self._symbolic is not None:
            self._symbolic.run(node, op, args, kwargs)
            node.meta["dynamic"] = self._symbolic.has_dynamic_size(node)
        if isinstance(val, (tuple, list)):
            return tuple(self._item(node, index, item) for index, item in enumerate(val))
        return node

    def _in_supported_layout(self, op: Any, operand: fx.Node) -> fx.Node:
        """Return the operand, or a copy of it in the order of memory that an operator wants."""
        val = operand.meta["val"]
        if not isinstance(val, torch.Tensor) or supports_layout(op, val):
            return operand
        copy: fx.Node = self.call(aten.clone.default, operand, memory_format=torch.contiguous_format)
        return copy

    def _result(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (op, _cache_key(args), _cache_key(kwargs))
        if key not in self._results:
            fakes = fx.node.map_aggregate((args, kwargs), _fake)
            with self._mode, torch.no_grad():
                self._results[key] = op(*fakes[0], **fakes[1])
        return self._results[key]

    def _item(self, node: fx.Node, index: int, val: Any) -> fx.Node | None:
        # Numbers among the results are known before the program runs, and torch's partitioner wants tensors only.
        if not isinstance(val, torch.Tensor):
            return None
        item = add_call(self.graph, operator.getitem, (node, index), {})
        self._finish(item, val)
        if self._symbolic is not None:
            self._symbolic.item(item, node, index)
            item.meta["dynamic"] = self._symbolic.has_dynamic_size(item)
        return item

    def _finish(self, node: fx.Node, val: Any) -> None:
        node.meta["val"] = val
        # Torch's partitioner puts nodes in the half that this tag names.
        node.meta["partitioner_tag"] = f"is_{self.phase}"

    def coordinate(self, axis: int) -> fx.Node:
        return self._coordinates[axis]

    def host_coordinate(self, axis: int) -> fx.Node:
        return self._host_coordinates[axis]

    def group(self, axis: int) -> str:
        return self._groups[axis]

    def seed(self) -> fx.Node:
        assert self._seed is not None, "add_rank_inputs() comes before the first operator"
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
        """Return True if the value lies row-major in memory, by the strides of the fake tensor."""
        return bool(value.meta["val"].is_contiguous())


def add_call(graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Add the call of an operator to the end of a graph."""
    node = graph.create_node("call_function", op, name=_call_name(op))
    # `create_node` looks through arguments for symbols, which takes longer than all else: they are set behind it.
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


@functools.cache
def _call_name(op: Any) -> str:
    # Without capitals: torch gives a saved tensor a second name in small letters, which would keep it alive.
    return str(op.__name__).replace(".", "_").lower()


def _fake(argument: Any) -> Any:
    """Return the fake tensor of a node, and the plain number of a size."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else plain(argument)


def _cache_key(argument: Any) -> Any:
    """Return what of an argument decides shapes, strides and types of the results."""
    if isinstance(argument, dict):
        return tuple((name, _cache_key(value)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(map(_cache_key, argument))
    value = _fake(argument)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    # Equal numbers of different types, such as 1 and True, give results of different types.
    return _cache_key(value) if isinstance(value, (list, tuple)) else (type(value), value)


# Kernels that read their operands as if these were contiguous: other operands give an error, or numbers of other
# elements. Torch itself hardly ever calls them so. In a rank's program an operand may come from a collective that left
# it in another order, and its shards may have dims of length one. The sets were found by calling every operator of
# torch's samples with operands in column order, and with strides that a dim of length one makes ambiguous.
_NEEDS_CONTIGUOUS = frozenset(
    {
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d_backward.default,
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss2d_backward.default,
    }
)
# The strides of images whose batch, height or width is one fit several memory formats, and the kernel mixes them up.
_NEEDS_CONTIGUOUS_IMAGES_ON_CPU = frozenset({aten.native_batch_norm_backward.default})
_NEEDS_CONTIGUOUS_LAST_DIM = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.view_as_complex.default,
    }
)


def supports_layout(op: Any, operand: torch.Tensor) -> bool:
    """Return True if an operator may read a tensor with these strides."""
    images = operand.ndim > 3 and operand.device.type == "cpu"
    if op in _NEEDS_CONTIGUOUS or (op in _NEEDS_CONTIGUOUS_IMAGES_ON_CPU and images):
        return operand.is_contiguous()
    return op not in _NEEDS_CONTIGUOUS_LAST_DIM or operand.ndim == 0 or operand.shape[-1] < 2 or operand.stride(-1) == 1
