"""Strategies that no frontier needs are dropped, and no others."""

from __future__ import annotations

import numpy as np

from autoshard.solver import Edge, Problem
from autoshard.solver.frontier_reduce import undominated_strategies

LIFE = ((0, 1), (0, 1))


def kept(usage: list[float], table: np.ndarray, held: np.ndarray | None = None) -> list[list[int]]:
    """What is left of two nodes, the first with costs 1, 2, 3 and these usages, joined by a table."""
    usages = (np.array(usage), np.array([1.0, 1.0]))
    problem = Problem((np.array([1.0, 2.0, 3.0]), np.array([4.0, 0.0])), (Edge(0, 1, table),), usages, LIFE)
    return [
        strategies.tolist() for strategies in undominated_strategies(problem, usages, None if held is None else [held])
    ]


def test_a_strategy_that_is_worse_in_both_is_dropped() -> None:
    assert kept([5, 5, 4], np.zeros((3, 2))) == [[0, 2], [1]]
    assert kept([3, 5, 4], np.zeros((3, 2))) == [[0], [1]]


def test_what_a_neighbour_may_prefer_stays() -> None:
    assert kept([1, 1, 1], np.array([[0.0, 9.0], [0.0, 0.0], [0.0, 0.0]]))[0] == [0, 1]


def test_memory_on_edges_counts() -> None:
    held = np.array([[0.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    assert kept([1, 1, 1], np.zeros((3, 2)), held)[0] == [0, 1]


def test_a_strategy_that_is_forbidden_with_every_neighbour_beats_none() -> None:
    table = np.array([[np.inf, np.inf], [0.0, 0.0], [np.inf, 0.0]])
    assert 1 in kept([1, 1, 0], table)[0]
    assert 2 in kept([1, 1, 0], table)[0]


def test_of_equal_strategies_the_first_stays() -> None:
    problem = Problem((np.array([1.0, 1.0]),), (), (np.array([2.0, 2.0]),), LIFE[:1])
    assert problem.usages is not None
    assert [one.tolist() for one in undominated_strategies(problem, problem.usages, None)] == [[0]]


def test_where_all_is_forbidden_one_is_left() -> None:
    problem = Problem((np.array([np.inf, np.inf]),), (), (np.array([2.0, 2.0]),), LIFE[:1])
    assert problem.usages is not None
    assert [one.tolist() for one in undominated_strategies(problem, problem.usages, None)] == [[0]]
