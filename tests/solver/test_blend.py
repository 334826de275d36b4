"""Edges that are sums of shared tables mean what their sum means, to a problem and to messages."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solver import Edge, Problem, SolverError, solve
from autoshard.solver.blend import BlendedEdge, blend
from autoshard.solver.trws import Messages

SIZES = (3, 4, 2, 3, 4)


def _problems(seed: int) -> tuple[Problem, Problem]:
    """A problem whose edges are sums of one, two and three tables, and the same with the sums made."""
    random = np.random.default_rng(seed)
    costs = tuple(random.random(size) for size in SIZES)
    edges = []
    for source in range(len(SIZES)):
        for target in range(source + 1, len(SIZES)):
            shape = SIZES[source], SIZES[target]
            first = np.where(random.random(shape) < 0.1, np.inf, random.random(shape))
            more = [(float(random.random()) + 0.1, random.random(shape)) for _ in range(random.integers(3))]
            ends = (source, target) if random.random() < 0.5 else (target, source)
            parts = [(1.0 + len(more), first), *more]
            if ends[0] == target:
                parts = [(factor, table.T) for factor, table in parts]
            edges.append(BlendedEdge(*ends, blend(parts)))
    dense = tuple(Edge(edge.source, edge.target, edge.costs) for edge in edges)
    return Problem(costs, tuple(edges)), Problem(costs, dense)


@pytest.mark.parametrize("seed", range(6))
def test_an_assignment_costs_the_sum(seed: int) -> None:
    blended, dense = _problems(seed)
    random = np.random.default_rng(seed)
    for _ in range(20):
        assignment = [int(random.integers(size)) for size in SIZES]
        assert blended.cost(assignment) == pytest.approx(dense.cost(assignment), rel=1e-12)
    assert solve(blended).cost == pytest.approx(solve(dense).cost, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_messages_add_up_what_they_read(seed: int) -> None:
    blended, dense = (Messages(problem, range(len(SIZES))).run(12) for problem in _problems(seed))
    assert blended.bound == pytest.approx(dense.bound, rel=1e-12)
    assert blended.assignment == dense.assignment
    assert blended.bound <= solve(_problems(seed)[1]).cost * (1 + 1e-9)


def test_a_table_that_comes_twice_counts_twice() -> None:
    table, other = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    built = blend([(1.0, table), (0.5, other), (2.0, table)])
    assert [factor for factor, _ in built.parts] == [3.0, 0.5]
    assert np.array_equal(built.table, 3 * table + 0.5)
    assert built.table is built.table
    assert built.at(1, 2) == 15.5


def test_what_is_no_cost_is_refused_in_every_part() -> None:
    good, bad = np.zeros((2, 2)), np.array([[0.0, np.nan], [0.0, 0.0]])
    with pytest.raises(SolverError, match="NaN"):
        Problem((np.zeros(2), np.zeros(2)), (BlendedEdge(0, 1, blend([(1.0, good), (2.0, bad)])),))
