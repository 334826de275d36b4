"""Rules for rows sent to groups and back, as tokens to the experts of a mixture (`routing.py`).

Every operator of a route has two further factors. With `source` sharded, a rank routes its own tokens among all groups,
and sends nothing. With `group` sharded, a rank also holds a stretch of the groups: ranks send each other the rows of
their groups in an all-to-all, and back in another, in forward and backward. A mesh may combine both: tokens over one
axis, tokens and groups over the other.

If an operator treats all rows in the same way and takes no number of rows as an argument, a rank can run it on any rows
that it received. So every operator between a dispatch and the combines of the same route gets a variant of its rule,
whose rows are split by source or group. For products of groups of rows, the groups' matrices are split alike. If one
operator of the route cannot have such a variant, the route is not split at all.

Source: GShard 3.2, expert parallelism; what is sent is not padded to a capacity, so that no token is dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from autoshard.operators.routed.routing import routing
from autoshard.patterns.exchanging import define_operator, exchange_ops
from autoshard.patterns.graph_variants import Place, graph_variants
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import aten, if_sharded, local_ends, local_group_bounds, reshape_along
from autoshard.patterns.ops.matmul import divide_into_units
from autoshard.patterns.ops.slicing import slice_backward_by_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Dims, Factor, LocalProgram, OpCall, Rule, TensorMeta, build
from autoshard.specs.emitter import collectives

_ROUTED_FACTORS = ("source", "group")
_ROUTE = ([["source", "repeats"]], [["source", "repeats"]], ["ways", "counted"])
"""Dims of the order of rows, of their places on arrival, and of the counts of sent and received rows."""


def _with_routed_tensors(rule: Rule, tensors: Collection[int]) -> Rule:
    """Mark tensors of a rule, by index (operands, then results), as routed, and its factors."""
    factors = (replace(each, routed=each.name if each.name in _ROUTED_FACTORS else "") for each in rule.factors)
    return replace(rule, factors=tuple(factors), routed=frozenset(tensors))


@rule_maker("autoshard::group")
def _group(call: OpCall) -> Rule:
    """Ranks exchange the numbers of rows of each group that they send."""
    (ids,) = call.operands
    groups = call.arg("groups")
    sizes = {"source": ids.shape[0], "repeats": 1, "group": groups, "ways": 2, "counted": groups}
    rule = build(
        sizes,
        [["source"]],
        [*_ROUTE, ["group"]],
        whole=["ways", "counted"],
        contiguous=_ROUTED_FACTORS,
        exchange={"group": [("exchange_of_each", 8 * groups)]},
        local=_local_group,
    )
    return _with_routed_tensors(rule, [1, 2, 3, 4])


@if_sharded("group")
def _local_group(call: LocalCall) -> Any:
    order, places, splits, ends = call.run()
    # One axis, since `fits` allows no strategy that sends rows over several.
    (axis,), emit = call.axes("group"), call.emit
    ranks, groups = emit.mesh.sizes[axis], call.arg("groups")
    sent = splits.select(0, 0)  # rows of each group that this rank sends
    each = [groups // ranks] * ranks
    received = emit.collective(collectives.all_to_all_single.default, sent, each, each, axis=axis)
    places, ends = emit.call(exchange_ops.arrivals.default, received, ranks, call.result_shape(1)[0])
    return order, places, emit.stack([sent, received]), ends


def _row_dims(meta: TensorMeta) -> dict[str, int]:
    """The dims of a row; rows are along the first dim of a tensor."""
    return {f"d{dim}": size for dim, size in enumerate(meta.shape[1:], start=1)}


@rule_maker("autoshard::dispatch", "autoshard::combine")
def _move_rows(call: OpCall) -> Rule:
    """Send rows to the ranks of their groups, or back to those of their tokens.

    `(values [T, ...], route) -> [S, ...]`, or `(rows [S, ...], route) -> [S, ...]`.
    """
    values, groups = call.operands[0], call.operands[-1].shape[1]
    dispatches = call.op is routing.dispatch.default
    dims = _row_dims(values)
    repeats = call.result.shape[0] // values.shape[0] if dispatches else 1
    sizes = {"source": values.shape[0], "repeats": repeats, "group": groups, **dims, "ways": 2, "counted": groups}
    rule = build(
        sizes,
        [["source", *dims], *_ROUTE],
        [[["source", "repeats"], *dims]],
        whole=["repeats", "ways", "counted"],
        contiguous=_ROUTED_FACTORS,
        exchange={"group": [("all_to_all", call.result.bytes)]},
        linear=[{0}],
        local=_local_dispatch if dispatches else _local_combine,
        uneven=list(dims),
    )
    return _with_routed_tensors(rule, [1, 2, 3, 4] if dispatches else [0, 1, 2, 3])


@if_sharded("group")
def _local_dispatch(call: LocalCall) -> Any:
    values, order, places, splits = call.operands
    # `order` contains indices of rows; each token has `repeats` consecutive rows.
    tokens = order.floor_divide(call.size("repeats"))
    arrived = _exchange_rows(call, values.index_select(0, tokens), splits, back=False)
    return arrived.index_select(0, places)


@if_sharded("group")
def _local_combine(call: LocalCall) -> Any:
    rows, order, places, splits = call.operands
    arrived = rows.index_copy(0, places, rows)  # a permutation writes every row
    returned = _exchange_rows(call, arrived, splits, back=True)
    return returned.index_copy(0, order, returned)


@rule_maker("autoshard::spread", "autoshard::collect")
def _group_table(call: OpCall) -> Rule:
    """Rows from a table with an entry for every group, or the reverse.

    `spread(table [groups, ...], places, ends) -> rows [S, ...]`: a rank needs only the entries of its own groups.
    `collect(rows [S, ...], places, ends) -> [groups, ...]`: each rank sums the rows that it holds.
    """
    spreads = call.op is routing.spread.default
    table, rows = (call.operands[0], call.result) if spreads else (call.result, call.operands[0])
    dims = _row_dims(rows)
    sizes = {"source": rows.shape[0], "group": table.shape[0], **dims}
    operand, result = ("group", "source") if spreads else ("source", "group")
    rule = build(
        sizes,
        [[operand, *dims], ["source"], ["group"]],
        [[result, *dims]],
        contiguous=_ROUTED_FACTORS,
        linear=[{0}],
        uneven=list(dims),
    )
    return _with_routed_tensors(rule, [1, 2, 3] if spreads else [0, 1, 2])


def _exchange_rows(call: LocalCall, rows: Any, splits: Any, back: bool) -> Any:
    (axis,), emit = call.axes("group"), call.emit
    return emit.call(exchange_ops.exchange.default, rows, splits, emit.mesh.sizes[axis], back, emit.group(axis))


# Products of groups of rows with one matrix per group, as in a mixture of experts.
#
# Groups are consecutive along one dim, and `offs` has their ends. A rank with a stretch of that dim clamps the ends to
# its stretch. A rank with some of the groups needs only their elements: it rotates the dim until they come first, so
# that the operator computes only them.

_ALIGNED_BYTES = 16
"""Rows, and shards of rows, must start at multiples of this number of bytes."""

GROUPED_DIM = {(2, 3): "i", (2, 2): "k", (3, 2): "j"}
"""The dim of the groups in a product `i k, k j -> i j`, by the numbers of dims of its operands.

Two operands of three dims are a batch of matrices.
"""


def _grouped_mm_or_zeros(
    left: Tensor, right: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`aten._grouped_mm`, also for a rank without rows, where torch's kernel fails."""
    if left.numel() and right.numel():
        product: Tensor = aten._grouped_mm.default(left, right, offs, bias, out_dtype)
        return product
    groups = offs.shape if left.dim() == right.dim() == 2 else ()
    return left.new_zeros((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


_SCHEMA = "(Tensor left, Tensor right, Tensor offs, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
_GROUPED_MM_OR_ZEROS = define_operator(f"grouped_mm_of_any{_SCHEMA}", _grouped_mm_or_zeros, _grouped_mm_or_zeros)


@rule_maker("aten._grouped_mm")
def _grouped_mm(call: OpCall) -> Rule | None:
    """Rows, columns and contracted dim of all groups, and the groups."""
    if call.arg("bias") is not None:
        return None
    left, right = call.operands[:2]
    ndims = len(left.shape), len(right.shape)
    grouped = GROUPED_DIM.get(ndims)
    sizes = (
        {"g": left.shape[0]} if grouped is None else {"g": call.operands[2].shape[0], "ends": call.operands[2].shape[0]}
    )
    dims: dict[str, list[str]] = {}
    for name, size in (("i", left.shape[-2]), ("k", left.shape[-1]), ("j", right.shape[-1])):
        lanes = 1 if name == grouped else _ALIGNED_BYTES // left.dtype.itemsize
        sizes[name], sizes[f"{name}_lane"] = divide_into_units(size, lanes)
        dims[name] = [name, f"{name}_lane"]

    def matrix(ndim: int, *names: str) -> list[list[str]]:
        return [["g"]] * (ndim - 2) + [dims[name] for name in names]

    return build(
        sizes,
        [matrix(ndims[0], "i", "k"), matrix(ndims[1], "k", "j"), *([["ends"]] for _ in call.operands[2:])],
        [matrix(2 if grouped in ("i", "j") else 3, "i", "j")],
        whole=["ends", "i_lane", "k_lane", "j_lane"],
        contiguous=[] if grouped is None else ["g", grouped],
        linear=[{0}, {1}],
        local=None if grouped is None else _local_grouped_mm,
        uneven=True,
        # No group extends into padding, and padding groups are empty.
        fill={} if grouped is None else {"g": None, grouped: None},
    )


def _local_grouped_mm(call: LocalCall) -> Any:
    left, right, ends = call.operands
    grouped = GROUPED_DIM[len(call.call.operands[0].shape), len(call.call.operands[1].shape)]
    length = call.operand_shape(1)[-1] if grouped == "j" else call.operand_shape(0)[0 if grouped == "i" else 1]
    if call.axes(grouped):
        ends = local_ends(call, ends, grouped, length)
    start = None
    if call.axes("g"):
        start, ends = local_group_bounds(call, ends, call.size("g"))
    if grouped in "ik":
        left = _align_groups(call, left, 0 if grouped == "i" else 1, start)
    if grouped in "kj":
        right = _align_groups(call, right, 0 if grouped == "k" else 1, start)
    # There may be no routed rows; torch's kernel requires at least one.
    op = _GROUPED_MM_OR_ZEROS if call.axes("group") else None
    product = call.run(op, operands=[left, right, ends])
    if start is None or grouped == "k":
        return product
    dim = 0 if grouped == "i" else 1
    computed = call.emit.arange(length, device=ends.device) < ends.slice(0, -1)
    # Rows behind this rank's groups were not computed, and are undefined.
    product = call.emit.where(reshape_along(computed, dim, 2), product, 0)
    return _align_groups(call, product, dim, -start)


def _align_groups(call: LocalCall, value: Any, dim: int, start: Any) -> Any:
    """A matrix whose dim `dim`, that of the groups, is the outer one in memory, so that groups are aligned.

    Args:
        start: the position to which the dim is rotated; None for no rotation.
    """
    emit = call.emit
    if dim == 1:
        value = value.t()
    if start is None:
        value = value.contiguous()
    else:
        length = value.shape[0]
        order = emit.arange(length, device=start.device) + start
        value = value.index_select(0, order.remainder(length))
    return value.t() if dim == 1 else value


# 8-bit products of groups of rows with one matrix per group, with a scale for every row and column.
#
# The dim of the groups may be sharded if it is rows or columns: a rank clamps the groups' ends to its stretch. Groups
# are not sharded, and neither is the contracted dim, whose sums are rounded.

_UNIT = 16
"""Kernels require rows of a multiple of this number of elements."""


@rule_maker("aten._scaled_grouped_mm")
def scaled_grouped_mm(call: OpCall) -> Rule | None:
    """Rows and columns; of a batch of matrices, the batch."""
    if call.arg("bias") is not None or call.arg("scale_result") is not None:
        return None
    left, right, scale_a, _, *ends = call.operands
    grouped = GROUPED_DIM.get((len(left.shape), len(right.shape)))
    rows, columns = left.shape[-2], right.shape[-1]
    groups = ends[0].shape[0] if ends else left.shape[0]
    if scale_a.shape not in ((rows,), (groups, rows), (groups * rows,)):
        return None  # blockwise scales
    sizes = {"g": groups, "i": rows, "k": left.shape[-1]}
    sizes["j"], sizes["j_lane"] = divide_into_units(columns, _UNIT)
    matrices = [["i"], ["k"]], [["k"], ["j", "j_lane"]]
    scales: list[list[list[str]]] = [[["i"]], [["j", "j_lane"]]]
    for place, meta in enumerate((left, right)):
        if len(meta.shape) == 3:
            matrices[place].insert(0, ["g"])
            scales[place].insert(0, ["g"])
        elif grouped == "k":
            scales[place][0].insert(0, "g")  # scales of all groups, concatenated
    result = [["i"], ["j", "j_lane"]]
    return build(
        sizes,
        [*matrices, *scales, *([["g"]] for _ in ends)],
        [result if grouped in ("i", "j") else [["g"], *result]],
        whole=["k", "j_lane", *(["g"] if grouped else [])],
        contiguous=[grouped] if grouped in ("i", "j") else [],
        local=_local_scaled_grouped_mm,
    )


def _local_scaled_grouped_mm(call: LocalCall) -> Any:
    left, right, *rest = call.operands
    grouped = GROUPED_DIM.get((len(left.shape), len(right.shape)))
    if grouped is not None and call.axes(grouped):
        length = left.shape[0] if grouped == "i" else right.shape[1]
        rest[-1] = local_ends(call, rest[-1], grouped, length)
    # Kernels require a row-major first and a column-major second matrix, whatever the layout of the shards.
    right = right.transpose(-2, -1).contiguous().transpose(-2, -1)
    return call.run(operands=[left.contiguous(), right, *(value.contiguous() for value in rest)])


# Hugging Face's product of groups of rows with one matrix per group, the fallback of mixtures of experts for
# `aten._grouped_mm` (`transformers::grouped_mm_fallback`): rows, columns, contracted dim, and the groups.
#
# Rows of groups that a rank does not hold are zero in its result, a partial sum. So expert weights may be sharded by
# expert, or by any of their other dims, and are never gathered.


@rule_maker("transformers::grouped_mm_fallback")
def grouped_product(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g]) -> [i, j]`."""
    text = "i^ k, g^ k j, ends! -> i^ j"
    return bind(text, call, linear="0, 1", local=_local_product, uneven=True, fill={"g": None})


@rule_maker("transformers::grouped_mm_fallback_backward")
def grouped_product_backward(call: OpCall) -> Rule:
    """`(rows [i, k], weights [g, k, j], ends [g], gradient [i, j]) -> [i, k], [g, k, j]`."""
    text = "i^ k, g^ k j, ends!, i^ j -> i^ k, g^ k j"
    return bind(text, call, linear="3", local=_local_product, uneven=True, fill={"g": None, "i": None})


def _local_product(call: LocalCall) -> Any:
    rows, weights, ends, *gradient = call.operands
    if call.axes("i"):
        ends = local_ends(call, ends, "i", call.operand_shape(0)[0])
    if not call.axes("g"):
        return call.run(operands=[rows, weights, ends, *gradient])
    start, ends = local_group_bounds(call, ends, call.operand_shape(1)[0])
    rows, *gradient = (_align_groups(call, value, 0, start) for value in (rows, *gradient))
    results = call.run(operands=[rows, weights, ends, *gradient])
    if not gradient:
        return _align_groups(call, results, 0, -start)
    return _align_groups(call, results[0], 0, -start), results[1]


# The operators between dispatch and combine: variants of their rules that split routed rows.

_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
_CUTS = frozenset({"aten::split", "aten::split_with_sizes", "aten::slice"})
_GROUPED = frozenset(
    {"aten::_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"}
)
"""Operators that take the ends of groups, with the factor `g` of groups in their rule."""

_RESULTS_OF_GROUP = ("route", "route", "route", "ends")

_KINDS_OF: dict[Any, tuple[str, ...]] = {
    routing.dispatch.default: ("", "route", "route", "route", "rows"),
    routing.combine.default: ("rows", "route", "route", "route", ""),
    routing.spread.default: ("", "route", "ends", "rows"),
    routing.collect.default: ("rows", "route", "ends", ""),
}
"""Kinds of the operands and results of a route's operators; "" for tensors that are not routed."""


@dataclass(frozen=True, slots=True)
class _RoutedTensor:
    """A tensor of a route.

    Attributes:
        route: the node that groups the rows.
        kind: rows; the ends of the groups among them; or the route itself, only for dispatch and combine.
        dim: the dim of the rows.
    """

    route: fx.Node
    kind: Literal["rows", "ends", "route"]
    dim: int = 0


@graph_variants
def with_routed_rows(
    rules: Mapping[fx.Node, Rule],
    calls: Mapping[fx.Node, OpCall],
    operands: Mapping[fx.Node, Sequence[Place]],
    outputs: Iterable[Place],
) -> dict[fx.Node, Rule]:
    """Return the rules of a graph, with variants for routed rows.

    Args:
        rules: of every node.
        calls: of every operator, in execution order.
        operands: the tensors that every operator takes.
        outputs: the tensors that the graph returns.
    """
    ways = _RouteTracker()
    for node, call in calls.items():
        routed = {position: ways.routed[place] for position, place in enumerate(operands[node]) if place in ways.routed}
        if call.op == routing.group.default:
            ways.begin(node, call, routed)
        elif routed:
            ways.follow(node, call, rules[node], routed)
    ways.unsplittable |= {ways.routed[place].route for place in outputs if place in ways.routed}
    return dict(rules) | ways.changed_rules(rules)


@dataclass(slots=True)
class _RouteTracker:
    """The routes of a graph, followed from operator to operator.

    Attributes:
        routed: the tensors of all routes.
        groups: the number of groups of every route.
        ends: operator where a route begins or ends (group, dispatch, combine, ...) -> the route.
        variants: the route of every other operator, and its further variant.
        closed: routes that cannot be split.
    """

    routed: dict[Place, _RoutedTensor] = field(default_factory=dict)
    groups: dict[fx.Node, int] = field(default_factory=dict)
    ends: dict[fx.Node, fx.Node] = field(default_factory=dict)
    variants: dict[fx.Node, tuple[fx.Node, Rule]] = field(default_factory=dict)
    unsplittable: set[fx.Node] = field(default_factory=set)
    _variant_cache: dict[tuple[object, ...], Rule | None] = field(default_factory=dict)  # equal calls share one variant

    def begin(self, node: fx.Node, call: OpCall, operands_of_route: Mapping[int, _RoutedTensor]) -> None:
        """Begin a route; if it depends on the rows of another, neither can be split."""
        self.unsplittable |= {node} if operands_of_route else set()
        self.unsplittable |= {each.route for each in operands_of_route.values()}
        self.ends[node], self.groups[node] = node, call.arg("groups")
        for index, kind in enumerate(_RESULTS_OF_GROUP):
            self.routed[node, index] = _RoutedTensor(node, kind)  # type: ignore[arg-type]

    def follow(self, node: fx.Node, call: OpCall, rule: Rule, operands_of_route: Mapping[int, _RoutedTensor]) -> None:
        """Follow routed tensors through an operator; if it has no variant for them, the route cannot be split."""
        route, *others = {each.route for each in operands_of_route.values()}
        kinds = [
            operands_of_route[position].kind if position in operands_of_route else ""
            for position in range(len(call.operands))
        ]
        if others:
            self.unsplittable |= {route, *others}
        if call.op in _KINDS_OF:
            *expected, result = _KINDS_OF[call.op]
            self.ends[node] = route
            if kinds != expected or any(each.dim for each in operands_of_route.values()):
                self.unsplittable.add(route)
            if result:
                self.routed[node, 0] = _RoutedTensor(route, "rows")
        elif not others:
            self._follow_row_operator(node, call, rule, route, operands_of_route)

    def _follow_row_operator(
        self, node: fx.Node, call: OpCall, rule: Rule, route: fx.Node, operands_of_route: Mapping[int, _RoutedTensor]
    ) -> None:
        dims = {position: each.dim for position, each in operands_of_route.items() if each.kind == "rows"}
        ends = frozenset(position for position, each in operands_of_route.items() if each.kind == "ends")
        if not dims or len(dims) + len(ends) < len(operands_of_route):
            self.unsplittable.add(route)
            return
        key = (id(rule), id(call), tuple(dims.items()), ends, self.groups[route])
        if key not in self._variant_cache:
            self._variant_cache[key] = routed_variant(rule, call, dims, ends, self.groups[route])
        variant = self._variant_cache[key]
        if variant is None:
            self.unsplittable.add(route)
            return
        self.variants[node] = route, variant
        for index, named in enumerate(variant.results):
            along = [dim for dim, factors in enumerate(named or ()) if factors == variant.indices("source")]
            if along:
                self.routed[node, index] = _RoutedTensor(route, "rows", along[0])

    def changed_rules(self, rules: Mapping[fx.Node, Rule]) -> dict[fx.Node, Rule]:
        """The changed rules; equal ones stay one object."""
        extended: dict[tuple[int, int], Rule] = {}
        shut: dict[int, Rule] = {}
        changed = {}
        for node, (route, variant) in self.variants.items():
            rule = rules[node]
            if route not in self.unsplittable:
                both = replace(rule, variants=(*rule.variants, variant))
                changed[node] = extended.setdefault((id(rule), id(variant)), both)
        for node, route in self.ends.items():
            if route in self.unsplittable:
                # The rows of a routing operator are whole.
                factors = (replace(each, shardable=each.shardable and not each.routed) for each in rules[node].factors)
                whole = replace(rules[node], factors=tuple(factors))
                changed[node] = shut.setdefault(id(rules[node]), whole)
        return changed


def routed_variant(
    rule: Rule, call: OpCall, dims: Mapping[int, int], ends: Collection[int], groups: int
) -> Rule | None:
    """The variant of an operator's rule that splits routed rows; None where it cannot have one.

    Args:
        dims: operands that are routed rows -> the dim of the rows.
        ends: the operands that are ends of groups.
        groups: the number of groups.
    """
    rows = _rows_factor(rule, dims)
    if rows is None or any(factor.name in ("source", "group") for factor in rule.factors):
        return None
    # Only products of groups read the ends of groups, and they require them.
    if bool(ends) != (call.name in _GROUPED):
        return None
    grouped = rule.indices("g")[0] if ends and rule.indices("g") else len(rule.factors)
    known, local = _rows_program(rule, call)
    if not known:
        return None
    factors = [*rule.factors] if grouped < len(rule.factors) else [*rule.factors, Factor("group", groups)]
    factors[rows] = Factor("source", rule.factors[rows].size, contiguous=True, routed="source")
    factors[grouped] = Factor("group", groups, contiguous=True, routed="group")
    operands = [((grouped,),) if position in ends else named for position, named in enumerate(rule.operands)]
    routed = {*dims, *ends, *(len(operands) + index for index, named in enumerate(rule.results) if _has(named, rows))}
    return replace(
        rule,
        factors=tuple(factors),
        operands=tuple(operands),
        local=local,
        variants=(),
        routed=frozenset(routed),
    )


def _rows_factor(rule: Rule, dims: Mapping[int, int]) -> int | None:
    """The factor of the rows: the only one of their dim, in no other dim, and at most summed over; None without one."""
    products = {rule.operands[position][dim] for position, dim in dims.items()}
    (factors,) = products if len(products) == 1 else ((),)
    if len(factors) != 1 or not rule.factors[factors[0]].shardable:
        return None
    (rows,) = factors
    for position, named in enumerate((*rule.operands, *rule.results)):
        for dim, each in enumerate(named or ()):
            elsewhere = position < len(rule.operands) and dims.get(position) != dim
            if rows in each and (each != factors or elsewhere):
                return None
    lacking = [index for index, named in enumerate(rule.results) if named is not None and not _has(named, rows)]
    return None if any(rule.factors[rows].reduction(index) != "sum" for index in lacking) else rows


def _has(named: Dims | None, factor: int) -> bool:
    return any(factor in each for each in named or ())


def _rows_program(rule: Rule, call: OpCall) -> tuple[bool, LocalProgram | None]:
    """Return True if the operator is known to run on any number of rows, and the program that does so."""
    # Cuts take positions in other dims, which do not depend on the number of rows.
    if rule.local is None or call.name in _GROUPED or call.name in _CUTS:
        return True, rule.local
    if call.op in _RESHAPES:
        return True, _reshape_rows
    if call.op is aten.slice_backward.default:
        # The operator itself takes all sizes of its result, including the number of rows.
        return True, slice_backward_by_padding
    return call.op is aten.expand.default, _expand_rows


def _shape_with_any_rows(call: LocalCall) -> list[int]:
    """The local shape of the result, with -1 for the number of rows."""
    rows, dims = call.rule.indices("source"), call.rule.results[0] or ()
    return [-1 if factors == rows else size for factors, size in zip(dims, call.result_shape(), strict=True)]


def _reshape_rows(call: LocalCall) -> Any:
    return call.operands[0].reshape(_shape_with_any_rows(call))


def _expand_rows(call: LocalCall) -> Any:
    return call.run(size=_shape_with_any_rows(call))
