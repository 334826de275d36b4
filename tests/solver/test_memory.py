from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem, solve
from tests.solver.problems import small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=100, deadline=None)
def test_moments_see_every_peak(problem: Problem) -> None:
    choice = [len(vector) - 1 for vector in problem.costs]
    held = [usage[-1] for usage in problem.usages]
    times = {time for life in problem.intervals for time in life}
    lives = list(zip(held, problem.intervals, strict=True))
    peaks = [sum(bytes for bytes, (low, high) in lives if low <= time < high) for time in times]
    assert np.isclose(problem.peak(choice), max(peaks, default=0.0))


def layers_that_flip_together(count: int, limit: float) -> Problem:
    """Every layer: replicated costs 1 and holds 8, sharded costs 2 and holds 1; neighbours like to agree."""
    costs = (np.array([1.0, 2.0]),) * count
    agree = np.array([[0.0, 0.001], [0.001, 0.0]])
    edges = tuple(Edge(node - 1, node, agree) for node in range(1, count))
    return Problem(costs, edges, (np.array([8.0, 1.0]),) * count, ((0, 10),) * count, limit)


@pytest.mark.parametrize("kept", [0, 1, 7, 20, 39])
def test_identical_layers_flip_one_at_a_time(kept: int) -> None:
    """Room for `kept` replicated layers: exactly that many are replicated, side by side."""
    problem = layers_that_flip_together(40, limit=40 + 7 * kept + 3)
    solution = solve(problem)
    assert solution.assignment.count(0) == kept
    assert solution.peak == 40 + 7 * kept
    assert solution.status == "optimal"
    assert np.isclose(solution.cost, kept + 2 * (40 - kept) + (0.001 if kept else 0.0))


@pytest.mark.parametrize("fraction", [0.2, 0.8])
def test_a_binding_limit_is_kept_and_the_optimum_found(fraction: float) -> None:
    problem = with_memory(two_axes(24, labels=3), fraction)
    ample = 300.0  # seconds, for a busy machine
    oracle = solve(problem, method="ilp", time_limit=ample)
    assert oracle.status == "optimal"
    solution = solve(problem, time_limit=ample)
    assert problem.feasible(solution.assignment)
    assert np.isclose(solution.cost, oracle.cost, rtol=1e-7)
    axis_by_axis = solve(problem, method="alternate", time_limit=ample)
    assert problem.feasible(axis_by_axis.assignment)
    assert axis_by_axis.lower_bound <= oracle.cost * (1 + 1e-9)
    assert oracle.cost * (1 - 1e-9) <= axis_by_axis.cost <= 1.2 * oracle.cost


def test_several_moments_bind_at_once() -> None:
    """Two groups of layers that never live together, each with a limit of its own to keep."""
    base = layers_that_flip_together(20, limit=40.0)
    lives = tuple((0, 5) if node < 10 else (5, 9) for node in range(20))
    problem = replace(base, intervals=lives, limit=31.0)
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.assignment[:10].count(0) == 3
    assert solution.assignment[10:].count(0) == 3


def test_a_limit_below_the_smallest_use_is_proved_infeasible() -> None:
    solution = solve(layers_that_flip_together(10, limit=9.0))
    assert solution.status == "infeasible"
    assert solution.assignment == ()
    assert solution.lower_bound == np.inf
    assert solution.gap == np.inf
