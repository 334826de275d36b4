"""Strategies that no point of a frontier needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem

_ROUNDS = 4  # passes over the nodes: what one loses may make strategies of its neighbours useless

_LARGEST = 300_000
"""Entries of a comparison of all pairs of a node's strategies on one edge, above which the node is left as it is."""


def undominated_strategies(
    problem: Problem, usages: Sequence[Array], edge_usages: Sequence[Array] | None
) -> list[IntArray]:
    """The strategies of every node that are left when those are dropped that another one beats in time and in memory.

    One beats another if it is at least as good in both, whatever the neighbours choose. Among equals the first stays,
    and every node keeps at least one, forbidden where all are.
    """
    kept = [_finite_strategies(costs) for costs in problem.costs]
    around: list[list[tuple[int, Array, Array | None]]] = [[] for _ in problem.costs]
    for number, edge in enumerate(problem.edges):
        held = None if edge_usages is None else edge_usages[number]
        around[edge.source].append((edge.target, edge.costs, held))
        around[edge.target].append((edge.source, edge.costs.T, None if held is None else held.T))
    for _ in range(_ROUNDS):
        before = sum(map(len, kept))
        for node, edges in enumerate(around):
            kept[node] = _undominated_of_node(kept, node, problem.costs[node], usages[node], edges)
        if sum(map(len, kept)) == before:
            break
    return kept


def _finite_strategies(costs: Array) -> IntArray:
    allowed = np.flatnonzero(np.isfinite(costs))
    return allowed if len(allowed) else np.zeros(1, dtype=np.int64)


def _undominated_of_node(
    kept: Sequence[IntArray],
    node: int,
    costs: Array,
    usage: Array,
    edges: Sequence[tuple[int, Array, Array | None]],
) -> IntArray:
    own = kept[node]
    if len(own) < 2 or any(len(own) ** 2 * len(kept[other]) > _LARGEST for other, _, _ in edges):
        return own
    # [s, t]: the most that choosing t instead of s can add.
    slower = costs[own][None, :] - costs[own][:, None]
    larger = usage[own][None, :] - usage[own][:, None]
    for other, table, held in edges:
        at = np.ix_(own, kept[other])
        allowed = np.isfinite(table[at])
        # Where s is forbidden, t loses nothing, whether it is forbidden too or not.
        with np.errstate(invalid="ignore"):  # both forbidden for good: no number, and no comparison
            slower = slower + _largest_increase(table[at], allowed)
        larger = larger + (_largest_increase(held[at], allowed) if held is not None else 0.0)
    better = (slower <= 0) & (larger <= 0)
    np.fill_diagonal(better, False)
    remains = np.ones(len(own), dtype=bool)
    # One after another, and only by a strategy that is still there: equals must not drop each other.
    for strategy in reversed(range(len(own))):
        remains[strategy] = not (better[strategy] & remains).any()
    return own[remains]


def _largest_increase(table: Array, allowed: np.ndarray) -> Array:
    """[s, t]: the largest table[t] - table[s] over the columns in which s is allowed."""
    with np.errstate(invalid="ignore"):  # forbidden minus forbidden, in columns that do not count
        more = table[None, :, :] - table[:, None, :]
    return np.where(allowed[:, None, :], more, -np.inf).max(2)
