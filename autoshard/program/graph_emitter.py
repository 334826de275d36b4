"""Emitters of a rank's program as an FX graph: every local operator is a node with the shape of its local tensor.

With dynamic sizes, operators are also run on tensors of symbolic sizes, which give shapes as expressions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture.symbols import expression_of
from autoshard.errors import PlanError, reason_of
from autoshard.program._torch import (
    FakeTensorMode,
    SymbolicNumbers,
    compute_elementwise_output_strides,
    run_meta_kernel,
)
from autoshard.size import DynamicSize, Ratio, Sizes, is_dynamic, plain
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.emitter import collectives

aten = torch.ops.aten


class SymbolicShapes:
    """Holds a fake tensor with symbolic sizes for every node of a program with dynamic sizes.

    Args:
        sizes: the values of the symbols in the program's own fake tensors.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._numbers = SymbolicNumbers()
        self._symbolic_sizes: dict[sympy.Expr, Any] = {}
        self._expressions: dict[sympy.Symbol, sympy.Expr] = {}
        self._tensors: dict[fx.Node, Any] = {}
        # Results of operators: equal calls are run once.
        self._results: dict[tuple[Any, ...], Any] = {}
        self._interned: dict[tuple[Any, ...], torch.Tensor] = {}

    def placeholder(self, node: fx.Node, shape: Sequence[int]) -> None:
        """Record an input of the program, of this local shape."""
        if any(map(is_dynamic, shape)):
            val = node.meta["val"]
            with self._numbers.mode:
                tensor = torch.empty([self._number(size) for size in shape], dtype=val.dtype, device=val.device)
            self._tensors[node] = self._intern(tensor)

    def run(self, node: fx.Node, op: Any, args: Any, kwargs: Any) -> None:
        """Run the operator of a node, if an argument depends on dynamic sizes."""
        leaves: list[Any] = []
        fx.node.map_aggregate((args, kwargs), leaves.append)
        if not any(is_dynamic(leaf) or (isinstance(leaf, fx.Node) and leaf in self._tensors) for leaf in leaves):
            return
        key = (op, _cache_key((args, kwargs), self._leaf_key))
        if key not in self._results:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._operand)
            with self._numbers.running():
                results = op(*args, **kwargs)
            single = isinstance(results, torch.Tensor)
            self._results[key] = self._intern(results) if single else tuple(map(self._intern, results))
        self._keep(node, self._results[key])

    def _intern(self, tensor: Any) -> Any:
        """Return the first tensor with this shape, these strides and this dtype."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        numbers = (*tensor.shape, *tensor.stride())
        layout = tuple(number.node.expr if isinstance(number, torch.SymInt) else number for number in numbers)
        return self._interned.setdefault((layout, tensor.dtype), tensor)

    def _leaf_key(self, value: Any) -> Any:
        """Return the properties of a node or number that determine the shape of an operator's results."""
        if isinstance(value, fx.Node) and value in self._tensors:
            # Tensors are interned, so equal ones have one id, and they live as long as the key.
            return id(self._tensors[value])
        return value.expr if isinstance(value, (DynamicSize, Ratio)) else _fake_key(value)

    def item(self, node: fx.Node, source: fx.Node, index: int) -> None:
        """Record a node that takes one of several results."""
        if source in self._tensors:
            self._keep(node, self._tensors[source][index])

    def has_dynamic_size(self, node: fx.Node) -> bool:
        """Return True if a size of a node's tensor is dynamic."""
        return node in self._tensors

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the local shape of a node's tensor."""
        if node not in self._tensors:
            return tuple(node.meta["val"].shape)
        return tuple(
            DynamicSize.of(expression_of(size, self._expressions), self.sizes)
            if isinstance(size, torch.SymInt)
            else size
            for size in self._tensors[node].shape
        )

    def _keep(self, node: fx.Node, value: Any) -> None:
        results = value if isinstance(value, (tuple, list)) else [value]
        sizes = [size for result in results if isinstance(result, torch.Tensor) for size in result.shape]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            self._tensors[node] = value

    def _operand(self, value: Any) -> Any:
        if isinstance(value, DynamicSize):
            return self._number(value)
        if isinstance(value, Ratio):
            return float(value)
        if not isinstance(value, fx.Node):
            return value
        if value in self._tensors:
            return self._tensors[value]
        val = value.meta["val"]
        if not isinstance(val, torch.Tensor):
            return val
        with self._numbers.mode:
            return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)

    def _number(self, size: int) -> Any:
        """Return torch's symbolic integer for a dynamic size."""
        return self._symbolic(size.expr) if isinstance(size, DynamicSize) else size

    def _symbolic(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        # Build sums and products from their parts, so that torch can prove equality and divisibility of sizes.
        if all(part.is_integer for part in expr.args):
            if expr.is_Add:
                return sum(self._symbolic(part) for part in expr.args)
            if expr.is_Mul:
                return math.prod(self._symbolic(part) for part in expr.args)
        # Anything else, such as a rounded quotient, is a symbol for torch.
        if expr not in self._symbolic_sizes:
            value = int(DynamicSize.of(expr, self.sizes))
            self._symbolic_sizes[expr], symbol = self._numbers.new(value, len(self._symbolic_sizes))
            self._expressions[symbol] = expr
        return self._symbolic_sizes[expr]


class GraphEmitter:
    """An `Emitter` whose values are FX nodes. Operators are run on fake tensors for shapes, equal calls once.

    Args:
        mesh: the mesh axes.
        groups: for every axis, the name of the process group of this rank's line along it.
        mode: the fake mode that the captured graph's tensors belong to.
        home: the device of the program's tensors.
        sizes: dynamic sizes of the fake tensors. Numbers that depend on them are `DynamicSize`s and `Ratio`s in the
            graph's arguments.
        results: a shared cache of fake results of calls.
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
        # The count of random operators so far, each with a unique stream number.
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
        """Return the operand, or a copy of it in a memory format that an operator supports."""
        val = operand.meta["val"]
        if not isinstance(val, torch.Tensor) or supports_layout(op, val):
            return operand
        copy: fx.Node = self.call(aten.clone.default, operand, memory_format=torch.contiguous_format)
        return copy

    def _result(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (op, _cache_key((args, kwargs), _fake_key))
        if key not in self._results:
            fakes = fx.node.map_aggregate((args, kwargs), _fake)
            with torch.no_grad():
                made: Any = run_meta_kernel(self._mode, op, *fakes) if op in _BY_META_KERNEL else None
                if made is None:
                    with self._mode:
                        made = op(*fakes[0], **fakes[1])
                        if op in _ARGUMENT_OF_ORDER:
                            made = _in_order_of_argument(_ARGUMENT_OF_ORDER[op], fakes[0], made)
            self._results[key] = made
        return self._results[key]

    def _item(self, node: fx.Node, index: int, val: Any) -> fx.Node | None:
        # Numbers among the results are known before the program runs, and torch's partitioner requires tensors.
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
        # Torch's partitioner puts nodes into the half named by this tag.
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
        """Return True if the value is contiguous, by the strides of the fake tensor."""
        return bool(value.meta["val"].is_contiguous())


# The most frequent operators of programs, with one result each.
_BY_META_KERNEL = frozenset(
    {
        aten.add.Tensor,
        aten.bmm.default,
        aten.cat.default,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.expand.default,
        aten.index_select.default,
        aten.mm.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.permute.default,
        aten.reshape.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.sub.Tensor,
        aten.sum.dim_IntList,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        collectives.all_gather_into_tensor.default,
        collectives.all_reduce.default,
        collectives.all_to_all_single.default,
        collectives.reduce_scatter_tensor.default,
        collectives.wait_tensor.default,
    }
)


# Elementwise operators whose kernels give the result the memory order of one argument (its index), where torch's fake
# result has that of another one. Found by calling every elementwise operator and gradient with row- and column-major
# tensors.
_ARGUMENT_OF_ORDER = dict.fromkeys(
    (
        aten.copysign.Tensor,
        aten.elu_backward.default,
        aten.floor_divide.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.logit_backward.default,
        aten.native_dropout_backward.default,
        aten.rrelu_with_noise_backward.default,
        aten.softplus_backward.default,
        aten.special_xlog1py.default,
        aten.xlogy.Tensor,
    ),
    0,
) | {aten.binary_cross_entropy_backward.default: 1}


def _in_order_of_argument(number: int, args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like the result of an elementwise operator, with the strides of its kernel."""
    tensors = [arg.expand(result.shape) for arg in (*args[number:], *args[:number]) if isinstance(arg, torch.Tensor)]
    return result.new_empty_strided(result.shape, compute_elementwise_output_strides(*tensors))


def add_call(graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Add the call of an operator to the end of a graph."""
    node = graph.create_node("call_function", op, name=_call_name(op))
    # Set arguments after `create_node`, which would search them for symbols, the slowest part.
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


@functools.cache
def _call_name(op: Any) -> str:
    # In lower case: torch gives a saved tensor a second, lower-case name, which would keep it alive.
    return str(op.__name__).replace(".", "_").lower()


def _fake(argument: Any) -> Any:
    """Return the fake tensor of a node, and the plain number of a size."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else plain(argument)


def _cache_key(argument: Any, leaf_key: Callable[[Any], Any]) -> Any:
    """Return a key of nested arguments, given that of a node or number."""
    if isinstance(argument, dict):
        return tuple((name, _cache_key(value, leaf_key)) for name, value in argument.items())
    if isinstance(argument, (list, tuple)):
        return tuple(_cache_key(value, leaf_key) for value in argument)
    return leaf_key(argument)


def _fake_key(leaf: Any) -> Any:
    """Return the properties of a node or number that determine shapes, strides and types of an operator's results."""
    value = _fake(leaf)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    # Equal numbers of different types, such as 1 and True, give results of different types.
    return _cache_key(value, _fake_key) if isinstance(value, (list, tuple)) else (type(value), value)


# Kernels that assume contiguous operands: others cause an error, or wrong elements. Torch itself hardly ever calls them
# with others. In a rank's program an operand may have another order after a collective, and shards may have dims of
# size 1. The sets were found by calling every operator of torch's samples with column-major operands, and with strides
# that are ambiguous because of a dim of size 1.
_NEEDS_CONTIGUOUS = frozenset(
    {
        aten._weight_norm_interface.default,
        aten._weight_norm_interface_backward.default,
        aten.adaptive_max_pool3d_backward.default,
        aten.fractional_max_pool2d_backward.default,
        aten.fractional_max_pool3d_backward.default,
        aten.grid_sampler_2d_backward.default,  # of torch 2.11
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss2d_backward.default,
    }
)
# Images whose batch, height or width is 1 fit several memory formats, which the kernel confuses.
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


class SharesEmitter(GraphEmitter):
    """A `GraphEmitter` of a program in which the ranks of one mesh axis hold unequal shares of a dynamic size.

    It is the program for a size that the axis does not divide, in which a rank's block begins at its coordinate times
    the block's size. The rank's share replaces that size, and the sum of the shares before it replaces that product.

    Args:
        mesh, groups, mode, home: as for `GraphEmitter`.
        sizes: the values of all symbols except those of shares.
        shared: the mesh axis.
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
        # Expressions in shares, in which no block is replaced.
        self._share_expressions: set[Any] = set()
        # Nodes that depend only on coordinates.
        self._coordinate_nodes: set[fx.Node] = set()

    def share(self, expr: Any) -> int:
        """Return a number of the program for an expression in the symbols of shares."""
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
            raise self._unequal_shares_error("a tensor", reason_of(error)) from error

    def _with_share(self, value: Any) -> Any:
        is_share = isinstance(value, DynamicSize) and value.expr in self._share_expressions
        return value if is_share else self.shared.with_share(value, self.sizes)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        # Replace blocks by shares before the operator is recorded.
        try:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._with_share)
        except ValueError as error:
            raise self._unequal_shares_error(op, reason_of(error)) from error
        # A number among the arguments is a rank's share, or a multiple of it.
        numbers: list[Any] = []
        fx.node.map_aggregate((args, kwargs), numbers.append)
        scaled = self.shared.is_shared(numbers)
        # Coordinate times block, replaced by the start of the rank's share.
        shared_coordinates = {self.coordinate(self.shared.axis), self.host_coordinate(self.shared.axis)}
        if scaled and op == aten.mul.Tensor and args[0] in shared_coordinates:
            start = self.share(args[1].expr / self.shared.own_share * self.shared.share_before)
            return super().call(aten.full.default, [], start, dtype=torch.int64, device=self.device(args[0]))
        operands: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), operands.append)
        # An operand that depends only on coordinates, including that on the shared axis, is a position of a block.
        shared_coordinates |= self._coordinate_nodes
        coordinates = shared_coordinates.union(self._coordinates, self._host_coordinates)
        places = not shared_coordinates.isdisjoint(operands) and coordinates.issuperset(operands)
        # A collective along the axis requires equal blocks on all ranks.
        moves = self._groups[self.shared.axis] in (*args, *kwargs.values())
        if (places and scaled) or (moves and any(self.shared.is_shared(self.shape(node)) for node in operands)):
            raise self._unequal_shares_error(op, "it moves what lies in shares, or counts in blocks")
        results = super().call(op, *args, **kwargs)
        if places:
            self._coordinate_nodes.update(results if isinstance(results, tuple) else (results,))
        return results

    def _unequal_shares_error(self, op: Any, why: str) -> PlanError:
        axis = self.mesh.names[self.shared.axis]
        return PlanError(
            f"axis {axis!r} shares {self.shared.whole} unevenly, and {op} of this plan needs equal shares: {why}. "
            f"Plan with the same shares, pin nothing along {axis!r} but to shares of {self.shared.whole}, or leave the "
            "shares out."
        )
