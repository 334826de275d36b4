"""Removal of strategies that no point of a frontier needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.solver.problem import Array, IntArray, Problem

# Passes over the nodes: a dropped strategy may make strategies of the neighbours useless.
_ROUNDS = 4

_LARGEST = 300_000
"""Most entries of a comparison of all pairs of a node's strategies on one edge; larger nodes stay as they are."""


def undominated_strategies(
    problem: Problem, usages: Sequence[Array], edge_usages: Sequence[Array] | None
) -> list[IntArray]:
    """Return the strategies of every node that no other one beats in time and in memory.

    One beats another if it is at least as good in both for all choices of the neighbours. The first of equal ones
    stays, and every node keeps at least one, forbidden if all are.
    """
    kept = [np.flatnonzero(np.isfinite(costs)) for costs in problem.costs]
    kept = [strategies if len(strategies) else np.zeros(1, dtype=np.int64) for strategies in kept]
    around: list[list[tuple[int, Array, Array | None]]] = [[] for _ in problem.costs]
    for number, edge in enumerate(problem.edges):
        edge_usage = None if edge_usages is None else edge_usages[number]
        around[edge.source].append((edge.target, edge.costs, edge_usage))
        around[edge.target].append((edge.source, edge.costs.T, None if edge_usage is None else edge_usage.T))
    for _ in range(_ROUNDS):
        before = sum(map(len, kept))
        for node, edges in enumerate(around):
            kept[node] = _undominated_of_node(kept, node, problem.costs[node], usages[node], edges)
        if sum(map(len, kept)) == before:
            break
    return kept


def _undominated_of_node(
    kept: Sequence[IntArray],
    node: int,
    costs: Array,
    usage: Array,
    edges: Sequence[tuple[int, Array, Array | None]],
) -> IntArray:
    strategies = kept[node]
    if len(strategies) < 2 or any(len(strategies) ** 2 * len(kept[neighbour]) > _LARGEST for neighbour, _, _ in edges):
        return strategies
    # [s, t]: the most that choosing t instead of s can add.
    slower = costs[strategies][None, :] - costs[strategies][:, None]
    larger = usage[strategies][None, :] - usage[strategies][:, None]
    for neighbour, table, edge_usage in edges:
        at = np.ix_(strategies, kept[neighbour])
        allowed = np.isfinite(table[at])
        # Where s is forbidden, t is no worse, even if it is forbidden too.
        # NaN where both are forbidden everywhere, which compares False.
        with np.errstate(invalid="ignore"):
            slower = slower + _largest_increase(table[at], allowed)
        larger = larger + (_largest_increase(edge_usage[at], allowed) if edge_usage is not None else 0.0)
    better = (slower <= 0) & (larger <= 0)
    np.fill_diagonal(better, False)
    remains = np.ones(len(strategies), dtype=bool)
    # Only a strategy that is still there may drop another: equal ones must not drop each other.
    for strategy in reversed(range(len(strategies))):
        remains[strategy] = not (better[strategy] & remains).any()
    return strategies[remains]


def _largest_increase(table: Array, allowed: np.ndarray) -> Array:
    """Return [s, t]: the largest table[t] - table[s] over the columns in which s is allowed."""
    # Infinity minus infinity, in columns that do not count.
    with np.errstate(invalid="ignore"):
        more = table[None, :, :] - table[:, None, :]
    return np.where(allowed[:, None, :], more, -np.inf).max(2)
