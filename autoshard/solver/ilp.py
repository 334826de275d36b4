"""The memory-constrained integer program of Rhino, sections 4.2 and 4.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from autoshard.solver.linear import Program, minimise
from autoshard.solver.moments import Moments
from autoshard.solver.network import Network
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.search import NOTHING, Found

_MAGNITUDE = 1e5
"""Costs are scaled to sums of about this size: the backend's absolute tolerances are then below any real difference."""


@dataclass(frozen=True, slots=True)
class IntegerResult:
    """An assignment (`NOTHING` if none was found), a bound, and whether the answer is final either way."""

    found: Found
    bound: float
    proved: bool


def cells(network: Network) -> int:
    """Entries of all edge tables: the size of the program."""
    return sum(table.size for node, around in network.edges.items() for other, table in around.items() if node < other)


def solve_integer(
    core: Network,
    *,
    moments: Moments | None = None,
    hint: Found = NOTHING,
    deadline: float = float("inf"),
    seed: int = 0,
) -> IntegerResult:
    """Solves a reduced network by mixed integer programming.

    X_us = 1 where node u takes strategy s. The product X_us X_vt of an edge is a continuous A_st whose rows sum to
    X_us and whose columns sum to X_vt: the same integer solutions as A_st >= X_us + X_vt - 1, and the tightest
    relaxation of an edge. Pairs that are forbidden have no A. One memory row per moment with a maximal set of live
    nodes (4.4), left out where even the largest usages keep the limit.

    Args:
        core: a feasible network after `reduce`; with usages where there are moments.
        moments: the limit; None where memory plays no part.
        hint: a known assignment.
        deadline: `time.monotonic()` seconds.
        seed: of the backend.

    Source: Rhino 4.2 and 4.4.
    """
    if not core.feasible or (moments is not None and not _fits_at_all(core, moments)):
        return IntegerResult(NOTHING, float("inf"), True)
    scale = _scale(core)
    program, nodes, pairs = _program(core, moments, scale)
    places = core.positions(hint.choices) if hint.choices else None
    answer = minimise(
        program,
        time_limit=min(deadline - monotonic(), 1e6),
        seed=seed,
        hint=None if places is None else _values(program, nodes, pairs, places),
    )
    if answer.infeasible:
        return IntegerResult(NOTHING, float("inf"), True)
    bound = answer.bound / scale + core.offset if np.isfinite(answer.bound) else float("-inf")
    if answer.values is None:
        return IntegerResult(NOTHING, bound, False)
    choices = {node: int(core.labels[node][np.argmax(answer.values[names])]) for node, names in nodes.items()}
    found = Found(core.expand(choices), core.value(choices))
    if moments is not None and not moments.respected(moments.loads(found.choices)):
        # The backend keeps rows within a tolerance; the limit itself is exact.
        return IntegerResult(NOTHING, bound, False)
    return IntegerResult(found, min(bound, found.cost), answer.optimal)


def _scale(core: Network) -> float:
    """What costs are multiplied with: the sum of the nodes' and edges' typical costs becomes `_MAGNITUDE`."""
    total = sum(float(np.abs(vector[np.isfinite(vector)]).mean()) for vector in core.vectors.values())
    for node, around in core.edges.items():
        for other, table in around.items():
            if node < other:
                total += float(np.abs(table[np.isfinite(table)]).mean())
    return _MAGNITUDE / total if total > 0 else 1.0


def _program(
    core: Network, moments: Moments | None, scale: float
) -> tuple[Program, dict[int, range], dict[tuple[int, int], tuple[range, IntArray]]]:
    """The program; the variables of each node, and of each edge with the (row, column) of each."""
    program = Program()
    nodes = {node: program.add_variables(scale * vector, integer=True) for node, vector in core.vectors.items()}
    pairs: dict[tuple[int, int], tuple[range, IntArray]] = {}
    for names in nodes.values():
        program.add_row(names, np.ones(len(names)), 1.0, 1.0)
    for node, around in core.edges.items():
        for other, table in around.items():
            if node < other:
                places = np.argwhere(np.isfinite(table))
                products = program.add_variables(scale * table[tuple(places.T)])
                pairs[node, other] = products, places
                for column, end in enumerate((node, other)):
                    _sums(program, nodes[end], products, places[:, column])
    if moments is not None:
        _memory_rows(program, core, moments, nodes)
    return program, nodes, pairs


def _sums(program: Program, names: range, products: range, places: IntArray) -> None:
    """The products of each strategy of one end sum to its variable."""
    for strategy, name in enumerate(names):
        mine = np.flatnonzero(places == strategy) + products.start
        program.add_row([*mine.tolist(), name], np.append(np.ones(len(mine)), -1.0), 0.0, 0.0)


def _memory_rows(program: Program, core: Network, moments: Moments, nodes: dict[int, range]) -> None:
    """Usages of live nodes within the limit, in units of the limit, at each moment where it can bind."""
    headroom = moments.limit - _held(core, moments)
    largest = moments.spread(_per_node(core, moments, np.max))
    unit = max(abs(moments.limit), 1.0)
    for moment in np.flatnonzero(largest > headroom):
        live = [node for node in nodes if moments.first[node] <= moment < moments.last[node]]
        names = np.concatenate([np.asarray(nodes[node]) for node in live])
        usages = np.concatenate([core.usages[node] for node in live])
        program.add_row(names, usages / unit, -np.inf, float(headroom[moment]) / unit)


def _held(core: Network, moments: Moments) -> Array:
    held = np.zeros(len(moments.usages))
    for node, usage in core.held.items():
        held[node] = usage
    return moments.spread(held)


def _per_node(core: Network, moments: Moments, pick: Callable[[Array], Any]) -> Array:
    usages = np.zeros(len(moments.usages))
    for node, usage in core.usages.items():
        usages[node] = pick(usage)
    return usages


def _fits_at_all(core: Network, moments: Moments) -> bool:
    """Whether the least usages keep the limit at every moment; otherwise nothing does."""
    return moments.respected(_held(core, moments) + moments.spread(_per_node(core, moments, np.min)))


def _values(
    program: Program,
    nodes: dict[int, range],
    pairs: dict[tuple[int, int], tuple[range, IntArray]],
    places: dict[int, int],
) -> Array:
    """All variables at a known assignment."""
    values = np.zeros(len(program.costs))
    for node, names in nodes.items():
        values[names[places[node]]] = 1.0
    for (node, other), (products, cells_of) in pairs.items():
        chosen = (cells_of[:, 0] == places[node]) & (cells_of[:, 1] == places[other])
        values[products.start + np.flatnonzero(chosen)] = 1.0
    return values
