"""Repeated layers of a problem, tied to one choice (Rhino 4.3, graph coarsening).

Layers with the same work usually have the same best options. Tied layers are one layer whose costs are multiplied by
their number, which is exactly the cost of all of them under that choice.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autoshard.capture.recomputation import repeated_modules
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.planning_problem import BuiltProblem, Variable
from autoshard.solver import Edge, Problem
from autoshard.solver.problem import Array, Blend
from autoshard.solver.reduced_problem import ReducedProblem

_MIN_LAYERS = 5  # the fewest layers of one kind to tie; the first and the last are free

Layer = tuple[int, int]
"""A family of equal layers, and the index of the layer in it."""


def layers_of(rules: GraphRules) -> dict[str, tuple[Layer, int]]:
    """Return name of every operator in a repeated layer -> the layer, and the operator's place in it.

    A layer is an outermost module that repeats.
    """
    placed: dict[str, tuple[Layer, int]] = {}
    # Layers repeat if they run the same calls; equal calls are one object.
    work = {node: (id(rules.calls[node]), rules.graph.phase(node)) for node in rules.operators}
    for family, module in enumerate(repeated_modules(rules.graph, work)):
        if len(module.paths) < _MIN_LAYERS or any(node.name in placed for nodes in module.nodes for node in nodes):
            continue
        for number, nodes in enumerate(module.nodes):
            placed.update({node.name: ((family, number), place) for place, node in enumerate(nodes)})
    return placed


@dataclass(frozen=True, eq=False)
class Tiling:
    """Variables of a problem that are tied to one choice.

    Attributes:
        leaders: the variables with a choice.
        follows: per variable, the index in `leaders` of the variable whose choice it takes; its own if it is a leader.
    """

    leaders: tuple[int, ...]
    follows: tuple[int, ...]

    @staticmethod
    def of(
        built: BuiltProblem, placed: Mapping[str, tuple[Layer, int]], free: Literal["runs", "families"] = "runs"
    ) -> Tiling | None:
        """Return the tiling of layers with equal variables and options; None if there are too few of them.

        Args:
            built: the problem.
            placed: the result of `layers_of`.
            free: the layers that are not tied: the first and the last of every run of consecutive layers with equal
                variables; or only those of every family, for a smaller problem.
        """
        roles = _roles(built, placed)
        members: dict[Layer, dict[Hashable, int]] = defaultdict(dict)
        # Of several variables with one role in a layer, one is tied.
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

    def tie(self, whole: ReducedProblem) -> ReducedProblem:
        """Return the problem of the leaders, without memory. Its bound does not hold for layers that choose freely."""
        order = [whole.order[leader] for leader in self.leaders]
        return replace(whole, problem=self._fold(whole.problem), order=order, lost=-math.inf, follows=self.follows)

    def _fold(self, problem: Problem) -> Problem:
        costs: list[Counter[int]] = [Counter() for _ in self.leaders]
        tables: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        arrays: dict[int, Array] = {}
        diagonals: list[list[Array]] = [[] for _ in self.leaders]  # edges between variables of one leader
        blended: set[tuple[int, int]] = set()
        for variable, vector in enumerate(problem.costs):
            arrays[id(vector)] = vector
            costs[self.follows[variable]][id(vector)] += 1
        for edge in problem.edges:
            pair = self.follows[edge.source], self.follows[edge.target]
            if pair[0] == pair[1]:
                # Both ends have the same choice: only the diagonal of the table counts.
                diagonals[pair[0]] += [factor * np.diagonal(table) for factor, table in edge.parts]
                continue
            counts = tables[pair]
            for factor, table in edge.parts:
                arrays[id(table)] = table
                counts[id(table)] = counts.get(id(table), 0.0) + factor
            if isinstance(edge.table, Blend):
                blended.add(pair)
        # Equal sums are one object, which the solver processes once.
        sums: dict[tuple[object, ...], Array] = {}
        blends: dict[tuple[object, ...], Blend] = {}

        def sum_arrays(counts: Mapping[int, float]) -> Array:
            key = tuple(counts.items())
            if key not in sums:
                parts = [(times, arrays[array]) for array, times in key]
                single = len(parts) == 1 and parts[0][0] == 1
                sums[key] = parts[0][1] if single else np.asarray(sum(times * part for times, part in parts))
            return sums[key]

        def join_edges(pair: tuple[int, int], counts: Mapping[int, float]) -> Edge:
            # A multiple of one table is a blend, since the product would be another large array.
            if pair not in blended and (len(counts) > 1 or 1.0 in counts.values()):
                return Edge(*pair, sum_arrays(counts))
            key = tuple(counts.items())
            if key not in blends:
                blends[key] = Blend(tuple((times, arrays[array]) for array, times in key))
            return Edge(*pair, blends[key])

        return Problem(
            costs=tuple(
                np.asarray(sum(added, start=sum_arrays(counts))) for counts, added in zip(costs, diagonals, strict=True)
            ),
            edges=tuple(join_edges(pair, counts) for pair, counts in tables.items()),
            components=None
            if problem.components is None
            else tuple(problem.components[leader] for leader in self.leaders),
        )


def _roles(built: BuiltProblem, placed: Mapping[str, tuple[Layer, int]]) -> dict[int, tuple[Layer, Hashable]]:
    """Return layer and role of the variables in layers: of operators by their place, of others by their edges."""
    roles: dict[int, tuple[Layer, Hashable]] = {}
    for number, variable in enumerate(built.variables):
        if variable.kind == "operator" and variable.key in placed:
            roles[number] = placed[variable.key]
    # Spread roles along edges, from operators to hubs and from these to tensors at rest, until nothing changes.
    counts: Counter[Hashable] = Counter()
    changed = True
    while changed:
        changed = False
        for edge in built.problem.edges:
            for known, other, side in ((edge.source, edge.target, "after"), (edge.target, edge.source, "before")):
                kind = built.variables[other].kind
                if known in roles and other not in roles and kind != "operator":
                    layer, role = roles[known]
                    counts[layer, role, side, kind] += 1
                    roles[other] = (layer, (role, side, kind, counts[layer, role, side, kind]))
                    changed = True
    return roles


def _ends(layers: Iterable[Layer]) -> set[Layer]:
    """Return the first and the last layer of every family, which have other neighbours than the rest."""
    families: dict[int, list[Layer]] = defaultdict(list)
    for layer in sorted(layers):
        families[layer[0]].append(layer)
    return {layer for family in families.values() for layer in (family[0], family[-1])}


def _runs(built: BuiltProblem, members: Mapping[Layer, Mapping[Hashable, int]]) -> list[list[Layer]]:
    """Return the runs of consecutive layers with equal variables and options that are long enough to tie."""
    options: dict[tuple[object, ...], int] = {}
    # By the type and identity of the object with the options, since equal layers share most of them.
    numbers: dict[tuple[int, type], int] = {}

    def number(variable: Variable) -> int:
        holder = variable.options if variable.kind == "operator" else variable.results[0]
        key = id(holder), type(variable.options[0])
        if key not in numbers:
            numbers[key] = options.setdefault((variable.kind, *variable.options), len(options))
        return numbers[key]

    def signature(layer: Layer) -> tuple[object, ...]:
        numbered = {role: number(built.variables[variable]) for role, variable in members[layer].items()}
        return tuple(sorted(numbered.items(), key=repr))

    runs: list[list[Layer]] = []
    last: tuple[object, ...] | None = None
    for layer in sorted(members):
        current = (layer[0], signature(layer))
        if current != last:
            runs.append([])
        runs[-1].append(layer)
        last = current
    return [run for run in runs if len(run) >= _MIN_LAYERS]
