"""Edges that are sums of shared tables mean what their sum means, to a problem and to messages."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.solver import Edge, Problem, SolverError, solve
from autoshard.solver.problem import blend
from autoshard.solver.trws import Messages


def example() -> Problem:
    return Problem(
        costs=(np.array([15.0]), np.array([55.0, 65.0])),
        edges=(Edge(0, 1, np.array([[30.0, np.inf]])), Edge(1, 0, np.array([[1.0], [2.0]]))),
        usages=(np.array([10.0]), np.array([25.0, 20.0])),
        intervals=((0, 5), (5, 9)),
        limit=30.0,
    )


def test_cost_adds_nodes_and_parallel_edges() -> None:
    assert example().cost([0, 0]) == 15 + 55 + 30 + 1
    assert example().cost([0, 1]) == np.inf


def test_lives_are_half_open() -> None:
    assert example().peak([0, 0]) == 25
    touching = Problem(example().costs, (), example().usages, ((0, 6), (5, 9)), 30.0)
    assert touching.peak([0, 0]) == 35
    assert not touching.feasible([0, 0])
    assert touching.feasible([0, 1])


def test_an_empty_life_uses_nothing() -> None:
    assert Problem(example().costs, (), example().usages, ((5, 5), (7, 2)), 0.0).peak([0, 0]) == 0


def test_a_shared_table_stays_one_object() -> None:
    table = np.ones((2, 2), dtype=np.float32)
    problem = Problem((np.zeros(2),) * 3, (Edge(0, 1, table), Edge(1, 2, table)))
    assert problem.edges[0].costs is problem.edges[1].costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": (np.array([15.0]), np.zeros(0))}, r"costs\[1\] has shape \(0,\)"),
        ({"costs": (np.array([np.nan]), np.zeros(2))}, r"costs\[0\] holds NaN"),
        ({"edges": (Edge(0, 2, np.zeros((1, 2))),)}, "names node 2, the problem has nodes 0 to 1"),
        ({"edges": (Edge(1, 1, np.zeros((2, 2))),)}, "joins node 1 with itself"),
        ({"edges": (Edge(0, 1, np.zeros((2, 1))),)}, r"shape \(2, 1\), but the nodes have 1 and 2"),
        ({"edges": (Edge(0, 1, np.array([[0.0, -np.inf]])),)}, "holds NaN or -inf"),
        ({"usages": None}, "belong together"),
        ({"usages": None, "intervals": None}, "no usages and intervals"),
        ({"usages": (np.array([1.0]), np.array([1.0, -2.0]))}, r"usages\[1\] holds a negative"),
        ({"intervals": ((0, 5),)}, "2 usages and 1 intervals for 2 nodes"),
        ({"limit": float("nan")}, "limit is NaN"),
        ({"components": (np.zeros((1, 2)), np.zeros((1, 2)))}, r"components\[1\] labels 1 strategies"),
        ({"components": (np.zeros((1, 2)), np.zeros((2, 1)))}, "differ in their number of axes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    whole = example()
    fields = {name: getattr(whole, name) for name in ("costs", "edges", "usages", "intervals", "limit")}
    with pytest.raises(SolverError, match=message):
        Problem(**{**fields, **change})


def test_an_assignment_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SolverError, match="1 entries, the problem has 2 nodes"):
        example().cost([0])
    with pytest.raises(SolverError, match=r"assignment\[1\] = 2"):
        example().peak([0, 2])


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
            edges.append(Edge(*ends, blend(parts)))
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
    assert np.array_equal(built.costs, 3 * table + 0.5)
    assert built.costs is built.costs
    assert Edge(0, 1, built).at(1, 2) == 15.5


def test_what_is_no_cost_is_refused_in_every_part() -> None:
    good, bad = np.zeros((2, 2)), np.array([[0.0, np.nan], [0.0, 0.0]])
    with pytest.raises(SolverError, match="NaN"):
        Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, blend([(1.0, good), (2.0, bad)])),))
