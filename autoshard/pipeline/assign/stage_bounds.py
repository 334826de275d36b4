"""Which stages a node can be on at all: its ancestors must run before it, its descendants behind it."""

from __future__ import annotations

import numpy as np

from autoshard.pipeline.assign.stage_problem import StageProblem
from autoshard.solver.problem import IntArray

_ROUNDING = 1e-9


def stage_bounds(problem: StageProblem) -> tuple[IntArray, IntArray] | None:
    """The first and the last stage of every node.

    Returns:
        Arrays of stages; None if some node fits nowhere, so that no assignment keeps the balance. Stages 0 to k hold
        what they can take at most, in seconds with the tolerance: a node with its ancestors, if that is more, does not
        end by stage k. In the same way from the end, with its descendants.

    Source: Rhino 5.2, with what the stages can take in place of the paper's perfectly balanced stages and an epsilon,
    so that no assignment within the tolerance is lost.
    """
    graph = problem.graph
    seconds = np.array([node.seconds for node in graph.nodes])
    reach = np.eye(len(graph.nodes), dtype=bool)  # [i, j]: j depends on i
    for value in sorted(graph.values, key=lambda value: -value.source):
        for user in value.users:
            reach[value.source] |= reach[user]
    capacity = np.array([problem.capacity(stage) for stage in range(problem.stages)])
    slack = _ROUNDING * capacity.sum()
    before, behind = seconds @ reach, reach @ seconds
    first = np.searchsorted(np.cumsum(capacity) + slack, before)
    last = problem.stages - 1 - np.searchsorted(np.cumsum(capacity[::-1]) + slack, behind)
    return None if (first > last).any() else (first, last)
