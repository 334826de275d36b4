"""Static dims that the ranks of an axis hold in unequal parts: sizes become multiples of one symbol (Whale 3.3.1).

A dim of 4096 in parts of 5 and 3 is 512 times a symbol of value 8, with shares 5 and 3. From there on, it is treated
like a dynamic size with unequal shares.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture.dynamic import DynamicSizes
from autoshard.capture.joint import JointGraph
from autoshard.capture.recomputation import copy_graph
from autoshard.errors import PlanError
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import GraphRules, Value, value_of
from autoshard.patterns.rule import Dims, OpCall, Rule
from autoshard.patterns.strategy import resolve_variant
from autoshard.size import DynamicSize, symbol
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of
from autoshard.specs.spec import is_shard

Loop = tuple[str, int]
"""A loop of an operator, or a dim of an input of the step: the node's name, and the index of the factor in its rule."""

aten = torch.ops.aten

_PARTS = symbol("parts")


def unequal_loops(flow: Flow, axis: int, placed: Collection[str] = ()) -> dict[Loop, int]:
    """Return the loops that decisions split along a mesh axis and that may be split into unequal parts.

    Args:
        flow: the graph and the decisions.
        axis: the mesh axis.
        placed: parameters and buffers whose placements must not change: dims in equal shards remain in them.

    Returns:
        One loop of each family (a dim, all over the graph), and its size.
    """
    families = _LoopClasses(flow.rules)
    equal: set[Loop | None] = set()
    for source in (source for source in flow.graph.inputs if source.name in placed):
        placement, dims = flow.produced_spec(Value(source.node))[axis], flow.rules.rules[source.node].results[0]
        if is_shard(placement) and dims is not None:
            equal |= {families.of((source.node.name, factor)) for factor in dims[dim_of(placement, len(dims))]}
    unequal: dict[Loop, int] = {}
    for node in flow.rules.operators:
        if flow.rules.pin_spec(node, flow.mesh) is None:
            rule, choices = resolve_variant(flow.rules.rules[node], flow.decisions.choices[node.name])
            choice = choices[axis]
            # Families contain the rule's own factors only, not those of variants.
            if rule is flow.rules.rules[node] and choice >= 0 and rule.factors[choice].size > 1:
                family = families.of((node.name, choice))
                if family is not None and family not in equal:
                    unequal[family] = rule.factors[choice].size
    return unequal


def with_unequal_loops(graph: JointGraph, mesh: MeshShape, loops: Iterable[Loop], total: int) -> JointGraph:
    """Return a graph in which the dims of some loops are multiples of a size with unequal shares.

    Args:
        graph: the captured step, with static sizes; it is not changed.
        mesh: the mesh axes.
        loops: loops as from `unequal_loops`, with sizes that `total` divides.
        total: number of parts of all ranks together.

    Raises:
        PlanError: a loop is not in the graph, or cannot be divided so.
    """
    rules = GraphRules(graph, mesh)
    families = _LoopClasses(rules)
    loops = list(loops)
    _check_loops(loops, total, families)
    chosen = {families.of((name, factor)) for name, factor in loops} - {None}
    copy, at = copy_graph(graph)
    example = {_PARTS: total}

    def size_of(node: fx.Node, factor: int) -> int:
        size = rules.rules[node].factors[factor].size
        return DynamicSize.of(size // total * _PARTS, example) if families.of((node.name, factor)) in chosen else size

    def shape_of(value: Value) -> tuple[int, ...]:
        dims = rules.rules[value.node].results[value.result]
        shape = value.meta.shape
        return tuple(
            math.prod([size_of(value.node, factor) for factor in factors]) if factors else size
            for size, factors in zip(shape, [()] * len(shape) if dims is None else dims, strict=True)
        )

    def cuts_of(node: fx.Node, dims: Dims) -> dict[int, tuple[Any, ...]]:
        loops = {dim: [size_of(node, factor) for factor in factors] for dim, factors in enumerate(dims)}
        return {
            dim: tuple(_cut_points(sizes))
            for dim, sizes in loops.items()
            if any(isinstance(size, DynamicSize) for size in sizes)
        }

    named: dict[str, dict[int, Any]] = {}
    cuts: dict[str, dict[int, tuple[Any, ...]]] = {}
    shapes = {value: shape_of(value) for value in rules.values()}
    for source in graph.inputs:
        sizes = {dim: size.expr for dim, size in enumerate(shapes[Value(source.node)]) if isinstance(size, DynamicSize)}
        if sizes:
            named[source.name] = sizes
            cuts[source.node.name] = cuts_of(source.node, rules.rules[source.node].results[0] or ())
    for node in graph.graph.nodes:
        val = node.meta.get("val")
        if node.op == "output" or not isinstance(val, (torch.Tensor, tuple, list)):
            continue
        values = (
            [value_of(node)] if isinstance(val, torch.Tensor) else [Value(node, index) for index in range(len(val))]
        )
        results = tuple(map(shapes.get, values))
        if any(isinstance(size, DynamicSize) for shape in results for size in shape or ()):
            at[node].meta["sizes"] = results
        if node in rules.calls:
            set_size_arguments(at[node], results)
    dynamic = DynamicSizes(named, {_PARTS: (2, None)}, (), example, _PARTS, cuts)
    return replace(copy, dynamic=dynamic)


def _check_loops(loops: Iterable[Loop], total: int, families: _LoopClasses) -> None:
    """Raise `PlanError` unless every loop's family may be divided into `total` equal parts."""
    rules = {node.name: rule for node, rule in families.rules.rules.items()}
    for name, factor in loops:
        factors = rules[name].factors if name in rules else ()
        if factor >= len(factors) or families.of((name, factor)) is None or factors[factor].size % total:
            raise PlanError(
                f"this plan divides loop {factor} of the operator {name} in {total} parts, which this model does not "
                "have, or can not have: the plan was edited, or made by another version of autoshard. Make it again."
            )


def _cut_points(loops: Sequence[int]) -> Iterator[Any]:
    """Yield the product of outer sizes at every cut of a dim made of some loops, so that the parts are a loop, too."""
    outside = sympy.Integer(1)
    for loop in loops:
        if outside != 1:
            yield outside
        if isinstance(loop, DynamicSize) and loop.expr != _PARTS:
            yield outside * _PARTS
        outside *= loop.expr if isinstance(loop, DynamicSize) else loop


class _LoopClasses:
    """Families of loops that are the same dim, all over a graph.

    A family is usable if all operators that touch its dims have them as one loop, and no operator takes its size as an
    argument that cannot be replaced.
    """

    def __init__(self, rules: GraphRules) -> None:
        self.rules = rules
        self._parent: dict[Loop, Loop] = {}
        self._order = {name: place for place, name in enumerate(node.name for node in rules.graph.graph.nodes)}
        self._excluded: set[Loop] = set()
        partners = self._returned_values()
        for value in rules.values():
            descriptions = rules.descriptions(value, partners)
            for dim, size in enumerate(value.meta.shape):
                if size > 1:
                    self._join_dim(descriptions, dim)
        for node in rules.operators:
            self._join_made_dims(node)
            told = factors_with_size_arguments(rules.calls[node], rules.rules[node])
            self._excluded.update(self._root((node.name, factor)) for factor in told)
        self._excluded = set(map(self._root, self._excluded))

    def of(self, loop: Loop) -> Loop | None:
        """Return the family of a loop, as its first loop; None if it is not usable."""
        root = self._root(loop)
        return None if root in self._excluded else root

    def _returned_values(self) -> dict[fx.Node, list[Value]]:
        """Return, for inputs of the step, the values returned for them: gradients, new values of buffers."""
        returned: dict[fx.Node, list[Value]] = defaultdict(list)
        given = {(source.name, source.kind == "tangent"): source.node for source in self.rules.graph.inputs}
        for output in self.rules.graph.outputs:
            node = given.get((output.name, output.kind == "output"))
            if node is not None and output.node is not None:
                returned[node].append(value_of(output.node))
        return returned

    def _join_dim(self, descriptions: Sequence[tuple[fx.Node, Dims | None]], dim: int) -> None:
        """Unite the loops that a dim is in the rules of all operators that touch it."""
        loops, sizes = [], []
        for node, dims in descriptions:
            factors = self.rules.rules[node].factors
            split = [factor for factor in (() if dims is None else dims[dim]) if factors[factor].size > 1]
            loops.append([(node.name, factor) for factor in split])
            sizes.append([factors[factor].size for factor in split])
        alike = all(each == sizes[0] for each in sizes)
        for column in zip(*loops, strict=True) if alike else [list(itertools.chain(*loops))]:
            for loop in column:
                self._unite(column[0], loop)
        # Some operator splits the dim differently, so no single loop is the same everywhere.
        if not alike:
            self._excluded.update(itertools.chain(*loops))

    def _join_made_dims(self, node: fx.Node) -> None:
        """Unite the dims that an operator makes, such as a diagonal's, with those it reads, if all sizes are equal."""
        rule = self.rules.rules[node]
        read = {factor for dims in rule.operands for factors in dims for factor in factors}
        written = {factor for dims in rule.results for factors in dims or () for factor in factors}
        sizes = {factor: rule.factors[factor].size for factor in read ^ written if rule.factors[factor].size > 1}
        if not read or sets_result_sizes(node) or sizes.keys() <= read:
            return
        loops = [(node.name, factor) for factor in sizes]
        for loop in loops:
            self._unite(loops[0], loop)
        if len(set(sizes.values())) > 1:
            self._excluded.update(loops)

    def _unite(self, *loops: Loop) -> None:
        # The first loop in the graph represents a family, independently of the order of joins.
        first, second = sorted(map(self._root, loops), key=lambda loop: self._order[loop[0]])
        if first != second:
            self._parent[second] = first

    def _root(self, loop: Loop) -> Loop:
        while loop in self._parent:
            above = self._parent[loop]
            # Path halving, so that later look-ups are short.
            self._parent[loop] = self._parent.get(above, above)
            loop = above
        return loop


# Sizes in the arguments of operators, and how to replace them.

_NO_SIZE_ARGUMENTS = frozenset(
    {
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_forward.default,
        aten.nll_loss2d_backward.default,
        aten.new_empty_strided.default,  # nothing depends on its strides, which are those of the whole tensor
    }
)
"""Operators whose only size arguments are those that `set_size_arguments` sets; their other numbers are indices."""

_SPATIAL = frozenset({aten.convolution.default, aten.convolution_backward.default})

_RANGE_END_ARGUMENT = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
"""The position of the argument of a range 0, 1, 2, ... that is its size."""

_ROW_COUNT_ARGUMENT = "num_weights"
"""The argument for the number of rows in the gradient of an embedding table."""


def factors_with_size_arguments(call: OpCall, rule: Rule) -> Iterator[int]:
    """Yield the factors of a rule whose sizes are arguments, except those that `set_size_arguments` sets."""
    arguments = call.op._schema.arguments
    if not call.operands:
        if not any(map(_is_shape, arguments)) and not _is_plain_range(call):
            yield from range(len(rule.factors))  # such as `linspace`
        return
    given = {argument.name for argument in arguments[: len(call.args)]} | dict(call.kwargs).keys()
    if call.op in _NO_SIZE_ARGUMENTS or not given.intersection(
        argument.name for argument in arguments if _is_size(argument)
    ):
        return
    names = {argument.name for argument in arguments}
    tensors = [*rule.operands, *(dims for dims in rule.results if dims is not None)]
    ndim = max(map(len, tensors))
    if call.op is aten.repeat.default or ("dim" in names and isinstance(call.arg("dim"), int)):
        tensors = [dims for dims in tensors if len(dims) == ndim]  # those with the dims that the arguments describe
    for dims in tensors:
        for place in _size_dims(call, ndim):
            if place < len(dims):
                yield from dims[place]


def set_size_arguments(node: fx.Node, results: Sequence[tuple[int, ...] | None]) -> None:
    """Replace the size arguments of a node by the sizes of its results."""
    assert isinstance(node.target, OpOverload)
    shape = results[0]
    if shape is None or not any(isinstance(size, DynamicSize) for size in shape):
        return
    if node.target in _RANGE_END_ARGUMENT:
        node.update_arg(_RANGE_END_ARGUMENT[node.target], shape[0])
        return
    if node.target is aten.repeat.default:
        before = _prepend_ones(node.args[0].meta["val"].shape, len(shape))  # type: ignore[union-attr]
        repeats = zip(before, shape, node.args[1], strict=True)  # type: ignore[arg-type]
        node.update_arg(1, [size if old == 1 else times for old, size, times in repeats])
        return
    for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
        if _is_shape(argument):
            node.update_arg(place, list(shape))
        elif argument.name == _ROW_COUNT_ARGUMENT:
            node.update_arg(place, shape[0])


def sets_result_sizes(node: fx.Node) -> bool:
    """Return True if `set_size_arguments` sets the sizes of the dims that an operator makes."""
    assert isinstance(node.target, OpOverload)
    arguments = node.target._schema.arguments
    return node.target is aten.repeat.default or any(
        _is_shape(argument) or argument.name == _ROW_COUNT_ARGUMENT for argument in arguments
    )


def _size_dims(call: OpCall, ndim: int) -> Sequence[int]:
    """Return the dims of a call's tensors to which its size and index arguments refer, if known."""
    names = call.argument_names
    if call.op in _SPATIAL:
        return range(2, ndim)
    if "normalized_shape" in names:
        return range(ndim - len(call.arg("normalized_shape")), ndim)
    if "dim" in names and isinstance(call.arg("dim"), int):
        return (call.arg("dim") % ndim,)
    if call.op is aten.constant_pad_nd.default:  # pairs, last dim first; dims without padding do not count
        pads = call.arg("pad")
        return [dim for dim in range(ndim) if any(pads[2 * (ndim - 1 - dim) : 2 * (ndim - dim)])]
    if call.op is aten.roll.default and call.arg("dims"):
        return [dim % ndim for dim in call.arg("dims")]
    if call.op is aten.repeat.default:  # where a dim of size 1 is repeated, the count is the size
        times = zip(_prepend_ones(call.operands[0].shape, ndim), call.arg("repeats"), strict=True)
        return [dim for dim, each in enumerate(times) if min(each) > 1]
    return range(ndim)


def _is_plain_range(call: OpCall) -> bool:
    """Return True if a call makes the range 0, 1, 2, ..."""
    if call.op not in _RANGE_END_ARGUMENT or not isinstance(call.arg("end"), int):
        return False
    names = call.argument_names
    return all(call.arg(name) == begin for name, begin in (("start", 0), ("step", 1)) if name in names)


def _is_shape(argument: Any) -> bool:
    """Return True if an argument is the shape of the result."""
    return argument.name in ("size", "input_sizes") and argument.real_type.kind() == "ListType"


def _is_size(argument: Any) -> bool:
    """Return True for an argument whose schema type is SymInt: a size, not a dim or a flag."""
    kind = argument.real_type
    while kind.kind() in ("ListType", "OptionalType"):
        kind = kind.getElementType()
    return bool(kind.kind() == "SymIntType") and not _is_shape(argument)


def _prepend_ones(shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return a shape with leading dims of size 1, up to `ndim` dims."""
    return (1,) * (ndim - len(shape)) + tuple(shape)
