from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem, solve
from autoshard.solver.course import Course
from autoshard.solver.flat.campaign import Campaign
from tests.solver.problems import brute_force, small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=40, deadline=None)
def test_small_problems_are_solved_and_proved(problem: Problem) -> None:
    best = brute_force(problem)
    course = Course(60.0)
    assert Campaign(problem, course).run()
    assert course.cost == pytest.approx(best)
    if np.isfinite(best):
        assert problem.feasible(course.assignment)
        assert course.lower_bound <= best + 1e-9 * max(abs(best), 1.0)
    else:
        assert course.assignment == ()


@pytest.mark.parametrize(("nodes", "fraction"), [(30, 0.2), (40, 0.5)])
def test_middling_problems_equal_the_integer_program(nodes: int, fraction: float) -> None:
    problem = with_memory(two_axes(nodes, labels=3, seed=nodes), fraction)
    oracle = solve(problem, method="ilp", time_limit=60.0)
    assert oracle.status == "optimal"
    course = Course(60.0)
    assert Campaign(problem, course).run()
    assert course.cost == pytest.approx(oracle.cost, rel=1e-9)


def test_without_a_limit_too() -> None:
    problem = two_axes(30, labels=3)
    course = Course(60.0)
    assert Campaign(problem, course).run()
    assert course.cost == pytest.approx(solve(problem).cost, rel=1e-9)


def test_what_only_the_integer_program_can_refute_is_infeasible() -> None:
    """Four nodes must all differ, and there are three strategies; memory keeps the nodes from elimination."""
    differ = np.where(np.eye(3, dtype=bool), np.inf, 0.0)
    edges = tuple(Edge(one, other, differ) for one, other in combinations(range(4), 2))
    usages = tuple(np.array([1.0, 2.0, 3.0]) for _ in range(4))
    lives = ((0, 4), (1, 5), (2, 6), (3, 7))
    course = Course(60.0)
    assert Campaign(Problem((np.zeros(3),) * 4, edges, usages, lives, 9.0), course).run()
    assert course.assignment == ()
