"""The operators between dispatch and combine: variants of their rules that split routed rows.

A rank does to the rows that came to it what it would do to all rows, whichever they are, as long as the operator treats
rows alike and takes no number of rows for an argument. So every operator on the way from a dispatch to the combines of
the same route gets a variant, whose rows are split by their sources or by the groups that they were sent to. Products
of groups of rows find the groups' matrices split alike.

Where one operator on the way can not have such a variant, the route is not split at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from autoshard.capture.routing import routing
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.slicing import slice_backward_by_padding
from autoshard.patterns.rule import Dims, Factor, LocalProgram, OpCall, Rule

aten = torch.ops.aten

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
"""Operators that take the ends of groups, and whose rule calls the groups `g`."""

_RESULTS_OF_GROUP = ("route", "route", "route", "ends")

_KINDS_OF: dict[Any, tuple[str, ...]] = {
    routing.dispatch.default: ("", "route", "route", "route", "rows"),
    routing.combine.default: ("rows", "route", "route", "route", ""),
    routing.spread.default: ("", "route", "ends", "rows"),
    routing.collect.default: ("rows", "route", "ends", ""),
}
"""Kinds of the operands of a route's operators, and of what they give; nothing for a tensor that lies as any other."""

Place = tuple[fx.Node, int]
"""A tensor of a graph: a node, and which of its results; `graph_rules.Value` is one."""


@dataclass(frozen=True, slots=True)
class _RoutedTensor:
    """A tensor on the way of a route.

    Attributes:
        route: the node that groups the rows.
        kind: rows; the ends of the groups among them; or the route itself, for dispatch and combine alone.
        dim: that rows lie along.
    """

    route: fx.Node
    kind: Literal["rows", "ends", "route"]
    dim: int = 0


def with_routed_rows(
    rules: Mapping[fx.Node, Rule],
    calls: Mapping[fx.Node, OpCall],
    operands: Mapping[fx.Node, Sequence[Place]],
    outputs: Iterable[Place],
) -> dict[fx.Node, Rule]:
    """The rules of a graph, with variants for routed rows.

    Args:
        rules: of every node.
        calls: of every operator, in the order in which they run.
        operands: the tensors that every operator takes.
        outputs: the tensors that leave the graph.
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
        routed: the tensors on the way.
        groups: the number of groups of every route.
        ends: routes by the operators that are made for them, at which they begin and end.
        variants: the route of every operator on the way, and its further variant.
        closed: routes that can not be split.
    """

    routed: dict[Place, _RoutedTensor] = field(default_factory=dict)
    groups: dict[fx.Node, int] = field(default_factory=dict)
    ends: dict[fx.Node, fx.Node] = field(default_factory=dict)
    variants: dict[fx.Node, tuple[fx.Node, Rule]] = field(default_factory=dict)
    unsplittable: set[fx.Node] = field(default_factory=set)
    _variant_cache: dict[tuple[object, ...], Rule | None] = field(default_factory=dict)  # equal calls share one variant

    def begin(self, node: fx.Node, call: OpCall, operands_of_route: Mapping[int, _RoutedTensor]) -> None:
        """A route begins; if by the rows of another, neither can be split."""
        self.unsplittable |= {node} if operands_of_route else set()
        self.unsplittable |= {each.route for each in operands_of_route.values()}
        self.ends[node], self.groups[node] = node, call.arg("groups")
        for index, kind in enumerate(_RESULTS_OF_GROUP):
            self.routed[node, index] = _RoutedTensor(node, kind)  # type: ignore[arg-type]

    def follow(self, node: fx.Node, call: OpCall, rule: Rule, operands_of_route: Mapping[int, _RoutedTensor]) -> None:
        """An operator takes routed tensors; if it does not know how, the route can not be split."""
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
        """The rules that are others now; equal ones stay one object."""
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
                changed[node] = shut.setdefault(id(rules[node]), _unsplit_rule(rules[node]))
        return changed


def _unsplit_rule(rule: Rule) -> Rule:
    """The rule of an operator that routes, whose rows stay whole."""
    factors = (replace(each, shardable=each.shardable and not each.routed) for each in rule.factors)
    return replace(rule, factors=tuple(factors))


def routed_variant(
    rule: Rule, call: OpCall, dims: Mapping[int, int], ends: Collection[int], groups: int
) -> Rule | None:
    """The variant of an operator's rule that splits routed rows; None where it can not have one.

    Args:
        dims: the operands that are routed rows, and the dim that these lie along.
        ends: the operands that say where groups end.
        groups: the number of groups.
    """
    rows = _rows_factor(rule, dims)
    if rows is None or any(factor.name in ("source", "group") for factor in rule.factors):
        return None
    name = call.op._schema.name
    if bool(ends) != (name in _GROUPED):
        return None
    grouped = rule.indices("g")[0] if ends and rule.indices("g") else len(rule.factors)
    known, local = _rows_program(rule, call, name)
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
    """The factor that rows are: the only one of their dim, nowhere else, and in the end added up if anything."""
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


def _rows_program(rule: Rule, call: OpCall, name: str) -> tuple[bool, LocalProgram | None]:
    """Return True if the operator is known to run on any number of rows, and the program that does so."""
    if rule.local is None or name in _GROUPED or name in _CUTS:
        return True, rule.local
    if call.op in _RESHAPES:
        return True, _reshape_rows
    if call.op is aten.slice_backward.default:
        return True, slice_backward_by_padding
    return call.op is aten.expand.default, _expand_rows


def _shape_with_any_rows(call: LocalCall) -> list[int]:
    """The local shape of the result, with as many rows as there are."""
    rows, dims = call.rule.indices("source"), call.rule.results[0] or ()
    return [-1 if factors == rows else size for factors, size in zip(dims, call.result_shape(), strict=True)]


def _reshape_rows(call: LocalCall) -> Any:
    return call.operands[0].reshape(_shape_with_any_rows(call))


def _expand_rows(call: LocalCall) -> Any:
    return call.run(size=_shape_with_any_rows(call))
