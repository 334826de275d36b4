from __future__ import annotations

import numpy as np
import pytest

from autoshard.solver import Edge, Problem, SolverError


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
