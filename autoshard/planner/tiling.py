"""Repeated layers in a problem: solved as one of them, then laid along all (Rhino 4.3, graph coarsening).

Layers that do the same work most often want the same options. Tied to one choice, they are one layer whose costs count
as often as there are layers; what it costs is exactly what all of them cost under that choice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.capture.joint import JointGraph
from autoshard.capture.repeats import repeats
from autoshard.planner.problem import BuiltProblem
from autoshard.solver import Edge, Problem
from autoshard.solver.blend import Blend, BlendedEdge
from autoshard.solver.problem import AnyEdge, Array

_FEWEST = 5
"""Layers of one kind from which they are worth tying: the first and the last of them stay free."""

Layer = tuple[int, int]
"""A family of layers, and which of them."""


def layers_of(graph: JointGraph) -> dict[str, tuple[Layer, int]]:
    """Name of every operator in a repeated layer -> the layer, and its place there.

    Of modules inside one another the outermost count.
    """
    placed: dict[str, tuple[Layer, int]] = {}
    for family, module in enumerate(repeats(graph).modules):
        if len(module.paths) < _FEWEST or any(node.name in placed for nodes in module.nodes for node in nodes):
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
    def of(built: BuiltProblem, placed: Mapping[str, tuple[Layer, int]]) -> Tiling | None:
        """The layers of a problem that have the same variables and options; None where too few do.

        Args:
            built: the problem.
            placed: as from `layers_of`.
        """
        roles = _roles(built, placed)
        members: dict[Layer, dict[Hashable, int]] = defaultdict(dict)
        for variable, (layer, role) in roles.items():
            members[layer].setdefault(role, variable)
        leader = list(range(len(built.variables)))
        for run in _runs(built, members):
            middle = run[1:-1]
            for layer in middle[1:]:
                for role, variable in members[layer].items():
                    leader[variable] = members[middle[0]][role]
        leaders = tuple(variable for variable, first in enumerate(leader) if variable == first)
        if len(leaders) == len(leader):
            return None
        position = {variable: place for place, variable in enumerate(leaders)}
        return Tiling(leaders, tuple(position[first] for first in leader))

    def fold(self, problem: Problem) -> Problem:
        """The problem in which every variable takes the option of the one that it follows; memory plays no part."""
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
        sums: dict[tuple[tuple[int, float], ...], Array] = {}

        def summed(counts: Mapping[int, float]) -> Array:
            key = tuple(counts.items())
            if key not in sums:
                sums[key] = np.asarray(sum(times * arrays[one] for one, times in key))
            return sums[key]

        def joined(pair: tuple[int, int], counts: Mapping[int, float]) -> AnyEdge:
            if pair in at_a_price:
                return BlendedEdge(*pair, Blend(tuple((times, arrays[one]) for one, times in counts.items())))
            return Edge(*pair, summed(counts))

        return Problem(
            costs=tuple(np.asarray(sum(more, start=summed(each))) for each, more in zip(costs, own, strict=True)),
            edges=tuple(joined(pair, counts) for pair, counts in tables.items()),
            components=None
            if problem.components is None
            else tuple(problem.components[leader] for leader in self.leaders),
        )

    def spread(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """An assignment of the folded problem as one of the whole."""
        return tuple(assignment[place] for place in self.follows)

    def messages(
        self, problem: Problem, folded: Problem, along: Sequence[Array], against: Sequence[Array]
    ) -> tuple[list[Array | None], list[Array | None]]:
        """Messages of the folded problem, shared evenly among the edges that an edge of it stands for."""
        edge_of = {(edge.source, edge.target): number for number, edge in enumerate(folded.edges)}
        ends = [(self.follows[edge.source], self.follows[edge.target]) for edge in problem.edges]
        counts = Counter(ends)
        return (
            [along[edge_of[end]] / counts[end] if end in edge_of else None for end in ends],
            [against[edge_of[end]] / counts[end] if end in edge_of else None for end in ends],
        )


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


def _runs(built: BuiltProblem, members: Mapping[Layer, Mapping[Hashable, int]]) -> list[list[Layer]]:
    """Layers that follow one another with the same variables and the same options, in runs that are worth tying."""
    options: dict[tuple[object, ...], int] = {}

    def signature(layer: Layer) -> tuple[object, ...]:
        named = {
            role: options.setdefault(tuple(built.variables[variable].options), len(options))
            for role, variable in members[layer].items()
        }
        return tuple(sorted(named.items(), key=repr))

    runs: list[list[Layer]] = []
    last: tuple[object, ...] | None = None
    for layer in sorted(members):
        own = (layer[0], signature(layer))
        if own != last:
            runs.append([])
        runs[-1].append(layer)
        last = own
    return [run for run in runs if len(run) >= _FEWEST]
