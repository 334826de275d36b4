"""Repeated layers in a problem: solved as one of them, then laid along all (Rhino 4.3, graph coarsening).

Layers that do the same work most often want the same options. Tied to one choice, they are one layer whose costs count
as often as there are layers; what it costs is exactly what all of them cost under that choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autoshard.capture.layers import repeated_modules
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.planning_problem import BuiltProblem, Variable
from autoshard.solver import Edge, Problem
from autoshard.solver.blend import Blend, BlendedEdge
from autoshard.solver.problem import AnyEdge, Array, IntArray

_MIN_LAYERS = 5
"""Layers of one kind from which they are worth tying: the first and the last of them stay free."""

Layer = tuple[int, int]
"""A family of layers, and which of them."""


def layers_of(rules: GraphRules) -> dict[str, tuple[Layer, int]]:
    """Name of every operator in a repeated layer -> the layer, and its place there.

    Of modules inside one another the outermost count.
    """
    placed: dict[str, tuple[Layer, int]] = {}
    work = {node: (id(rules.calls[node]), rules.graph.phase(node)) for node in rules.operators}  # equal calls are one
    for family, module in enumerate(repeated_modules(rules.graph, work)):
        if len(module.paths) < _MIN_LAYERS or any(node.name in placed for nodes in module.nodes for node in nodes):
            continue
        for number, nodes in enumerate(module.nodes):
            placed.update({node.name: ((family, number), place) for place, node in enumerate(nodes)})
    return placed


@dataclass(frozen=True, eq=False)
class Tiling:
    """Which variables of a problem choose alike.

    Attributes:
        leaders: the variables that choose.
        follows: per variable, the position among `leaders` of the one that it follows; its own where it leads.
    """

    leaders: tuple[int, ...]
    follows: tuple[int, ...]

    @staticmethod
    def of(
        built: BuiltProblem, placed: Mapping[str, tuple[Layer, int]], free: Literal["runs", "families"] = "runs"
    ) -> Tiling | None:
        """The layers of a problem that have the same variables and options; None where too few do.

        Args:
            built: the problem.
            placed: as from `layers_of`.
            free: which layers stay free: the first and the last of every run of layers that follow one another and are
                alike to the last variable; or those of all layers of a kind, which is less to look through.
        """
        roles = _roles(built, placed)
        members: dict[Layer, dict[Hashable, int]] = defaultdict(dict)
        for variable, (layer, role) in roles.items():
            members[layer].setdefault(role, variable)
        leader = list(range(len(built.variables)))
        ends = _ends(members)
        for run in _runs(built, members):
            middle = run[1:-1] if free == "runs" else [layer for layer in run if layer not in ends]
            for layer in middle[1:]:
                for role, variable in members[layer].items():
                    leader[variable] = members[middle[0]][role]
        leaders = tuple(variable for variable, first in enumerate(leader) if variable == first)
        if len(leaders) == len(leader):
            return None
        position = {variable: place for place, variable in enumerate(leaders)}
        return Tiling(leaders, tuple(position[first] for first in leader))

    def fold(self, problem: Problem, kept: Sequence[IntArray] | None = None) -> Problem:
        """The problem in which every variable takes the option of the one that it follows; memory plays no part.

        Args:
            problem: the whole problem.
            kept: for every leader the options that it may choose among, ascending; all by default.
        """
        costs: list[Counter[int]] = [Counter() for _ in self.leaders]
        tables: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        arrays: dict[int, Array] = {}
        own: list[list[Array]] = [[] for _ in self.leaders]  # edges between two that choose alike
        at_a_price: set[tuple[int, int]] = set()
        for variable, vector in enumerate(problem.costs):
            arrays[id(vector)] = vector
            costs[self.follows[variable]][id(vector)] += 1
        for edge in problem.edges:
            pair = self.follows[edge.source], self.follows[edge.target]
            if pair[0] == pair[1]:
                own[pair[0]] += [factor * np.diagonal(table) for factor, table in edge.parts]
                continue
            counts = tables[pair]
            for factor, table in edge.parts:
                arrays[id(table)] = table
                counts[id(table)] = counts.get(id(table), 0.0) + factor
            if isinstance(edge, BlendedEdge):
                at_a_price.add(pair)
        sums: dict[tuple[object, ...], Array] = {}
        blends: dict[tuple[object, ...], Blend] = {}

        def select(array: Any, *leaders: int) -> Any:
            return array if kept is None else array[np.ix_(*(kept[leader] for leader in leaders))]

        def sum_arrays(counts: Mapping[int, float], *leaders: int) -> Array:
            key = (*counts.items(), *(leaders if kept is not None else ()))
            if key not in sums:
                parts = [(times, select(arrays[one], *leaders)) for one, times in counts.items()]
                alone = len(parts) == 1 and parts[0][0] == 1
                sums[key] = parts[0][1] if alone else np.asarray(sum(times * part for times, part in parts))
            return sums[key]

        def join_edges(pair: tuple[int, int], counts: Mapping[int, float]) -> AnyEdge:
            repeated = kept is None and len(counts) == 1 and 1.0 not in counts.values()
            if pair not in at_a_price and not repeated:
                return Edge(*pair, sum_arrays(counts, *pair))
            key = (*counts.items(), *(pair if kept is not None else ()))
            if key not in blends:
                blends[key] = Blend(tuple((times, select(arrays[one], *pair)) for one, times in counts.items()))
            return BlendedEdge(*pair, blends[key])

        def total(leader: int) -> Array:
            return np.asarray(
                sum((select(more, leader) for more in own[leader]), start=sum_arrays(costs[leader], leader))
            )

        return Problem(
            costs=tuple(map(total, range(len(self.leaders)))),
            edges=tuple(join_edges(pair, counts) for pair, counts in tables.items()),
            components=None
            if problem.components is None
            else tuple(select(problem.components[leader], place) for place, leader in enumerate(self.leaders)),
        )

    def spread(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the folded problem as one of the whole."""
        return tuple(assignment[place] for place in self.follows)

    def messages(
        self, problem: Problem, along: Sequence[Array], against: Sequence[Array]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Messages of the folded problem, shared evenly among the edges that an edge of it stands for."""
        ends = [(self.follows[edge.source], self.follows[edge.target]) for edge in problem.edges]
        counts = Counter(ends)
        between = [end for end in counts if end[0] != end[1]]  # as `fold` lists them
        one_along = {end: message / counts[end] for end, message in zip(between, along, strict=True)}
        one_against = {end: message / counts[end] for end, message in zip(between, against, strict=True)}
        return [one_along.get(end) for end in ends], [one_against.get(end) for end in ends]


def _roles(built: BuiltProblem, placed: Mapping[str, tuple[Layer, int]]) -> dict[int, tuple[Layer, Hashable]]:
    """Layer and role of every variable that belongs to one: operators by their place, others by what they join."""
    roles: dict[int, tuple[Layer, Hashable]] = {}
    for number, variable in enumerate(built.variables):
        if variable.kind == "operator" and variable.key in placed:
            roles[number] = placed[variable.key]
    taken: Counter[Hashable] = Counter()
    grown = True
    while grown:
        grown = False
        for edge in built.problem.edges:
            for known, other, side in ((edge.source, edge.target, "after"), (edge.target, edge.source, "before")):
                if known in roles and other not in roles and built.variables[other].kind != "operator":
                    layer, role = roles[known]
                    asked = (layer, role, side, built.variables[other].kind)
                    taken[asked] += 1
                    roles[other] = (layer, (role, side, built.variables[other].kind, taken[asked]))
                    grown = True
    return roles


def _ends(layers: Iterable[Layer]) -> set[Layer]:
    """The first and the last layer of every family: what they join is no layer like themselves."""
    families: dict[int, list[Layer]] = defaultdict(list)
    for layer in sorted(layers):
        families[layer[0]].append(layer)
    return {layer for family in families.values() for layer in (family[0], family[-1])}


def _runs(built: BuiltProblem, members: Mapping[Layer, Mapping[Hashable, int]]) -> list[list[Layer]]:
    """Layers that follow one another with the same variables and the same options, in runs that are worth tying."""
    options: dict[tuple[object, ...], int] = {}
    numbers: dict[int, int] = {}  # of what holds options, by identity: equal layers share most of it

    def number(variable: Variable) -> int:
        holder = variable.options if variable.kind == "operator" else variable.results[0]
        if id(holder) not in numbers:
            numbers[id(holder)] = options.setdefault((variable.kind, *variable.options), len(options))
        return numbers[id(holder)]

    def signature(layer: Layer) -> tuple[object, ...]:
        named = {role: number(built.variables[variable]) for role, variable in members[layer].items()}
        return tuple(sorted(named.items(), key=repr))

    runs: list[list[Layer]] = []
    last: tuple[object, ...] | None = None
    for layer in sorted(members):
        own = (layer[0], signature(layer))
        if own != last:
            runs.append([])
        runs[-1].append(layer)
        last = own
    return [run for run in runs if len(run) >= _MIN_LAYERS]
