"""The backbone of a graph, its critical nodes, and an order that interleaves forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import IntArray, Problem

_HEAVY = 0.5
"""Share of all work that the fewest nodes do which count as computationally intensive."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The longest paths through a graph.

    Attributes:
        nodes: all nodes on a longest path, in order.
        critical: those among them that are computationally intensive.
    """

    nodes: tuple[int, ...]
    critical: tuple[int, ...]


def backbone(problem: Problem, order: Sequence[float]) -> Backbone:
    """Return the nodes with equal earliest and latest times, if every node takes one unit of time.

    The computationally intensive nodes are the heaviest that together make half of the sum. The weight of a node is the
    cost of its cheapest strategy, which no plan avoids.

    Args:
        problem: the problem; every edge leads from the earlier of its nodes to the later one.
        order: per node, its time; equal ones by their number.

    Source: Rhino 4.3.1.
    """
    rank, ends = _ranks_and_edges(problem, order)
    earliest = np.zeros(problem.size, dtype=np.int64)
    # In the order of their first nodes, whose times are then final.
    for earlier, later in ends[np.argsort(rank[ends[:, 0]], kind="stable")]:
        earliest[later] = max(earliest[later], earliest[earlier] + 1)
    remaining = np.zeros(problem.size, dtype=np.int64)
    for earlier, later in ends[np.argsort(-rank[ends[:, 1]], kind="stable")]:
        remaining[earlier] = max(remaining[earlier], remaining[later] + 1)
    # Earliest time plus the longest way to the end is the length of the longest path through a node; on the backbone it
    # is that of the graph, so that latest and earliest time agree.
    length = int((earliest + remaining).max(initial=0))
    nodes = [int(node) for node in np.argsort(rank) if earliest[node] + remaining[node] == length]
    heavy = _heavy_nodes(problem)
    return Backbone(tuple(nodes), tuple(node for node in nodes if heavy[node]))


def _heavy_nodes(problem: Problem) -> np.ndarray:
    work = np.array([vector.min() for vector in problem.costs])
    work = np.where(np.isfinite(work) & (work > 0), work, 0.0)
    heaviest = np.argsort(-work, kind="stable")
    # The fewest that reach the share.
    needed = np.searchsorted(np.cumsum(work[heaviest]), _HEAVY * work.sum())
    heavy = np.zeros(problem.size, dtype=bool)
    heavy[heaviest[: needed + 1]] = True
    return heavy & (work > 0)


def interleaved_order(problem: Problem, order: Sequence[float]) -> IntArray:
    """Return all nodes in an order that places a node of the backward half beside the forward nodes it depends on.

    A training step runs its layers forward, then backward, and saved tensors join places that are far apart. The step
    turns where most edges cross. A node after the turn is placed behind the last node before the turn that it is joined
    with, or else beside the node after the turn that it follows. Only the order of a search depends on this: a graph
    that does not turn is cut worse, not wrongly.

    Args:
        problem: the problem.
        order: per node, its time; equal ones by their number.
    """
    rank, ends = _ranks_and_edges(problem, order)
    turn = _turning_point(rank[ends], problem.size)
    place = rank.astype(np.float64)
    before: list[list[int]] = [[] for _ in range(problem.size)]
    for earlier, later in ends:
        before[later].append(int(earlier))
    for node in np.argsort(rank)[turn:]:
        first_half = [place[predecessor] for predecessor in before[node] if rank[predecessor] < turn]
        second_half = [place[predecessor] for predecessor in before[node] if rank[predecessor] >= turn]
        if first_half:
            # Half a place: behind that node, and before the one after it.
            place[node] = max(first_half) + 0.5
        elif second_half:
            place[node] = min(second_half)
    return np.lexsort((rank, place))


def _turning_point(ranks: IntArray, size: int) -> int:
    """Return the number of nodes before the last of the places that most edges cross."""
    change = np.zeros(size + 1, dtype=np.int64)
    np.add.at(change, ranks[:, 0] + 1, 1)
    np.subtract.at(change, ranks[:, 1] + 1, 1)
    return size - int(np.cumsum(change)[::-1].argmax())


def _ranks_and_edges(problem: Problem, order: Sequence[float]) -> tuple[IntArray, IntArray]:
    """Return per node its place in the order, and all edges as (earlier, later) nodes."""
    rank = np.empty(problem.size, dtype=np.int64)
    rank[np.argsort(np.asarray(order, dtype=np.float64), kind="stable")] = np.arange(problem.size)
    ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
    turned = rank[ends[:, 0]] > rank[ends[:, 1]]
    ends[turned] = ends[turned, ::-1]
    return rank, ends
