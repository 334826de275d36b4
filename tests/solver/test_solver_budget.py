from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from autoshard.solver import Problem, SolverError, SolverProgress, solve
from autoshard.solver.bound import certify, lower_bound
from autoshard.solver.local_search import NO_ASSIGNMENT
from autoshard.solver.network import Network, Tables
from autoshard.solver.solver_budget import UNLIMITED, Budget
from tests.solver.problems import layered_problem, two_axes, with_memory


@pytest.fixture(scope="module")
def hard() -> Problem:
    """Under a limit, and too large for the integer program at once."""
    return with_memory(two_axes(60, labels=5, density=0.9), 0.3)


def test_only_better_assignments_are_kept() -> None:
    course = Budget(10.0)
    assert course.assignment == ()
    assert course.offer(3.0, lambda: (1,), "first")
    assert not course.offer(3.0, lambda: (2,), "second")
    assert course.assignment == (1,)
    assert course.method == "first"


def test_work_is_counted_down() -> None:
    course = Budget(10.0, work_limit=5)
    assert course.has_work_limit
    assert course.deadline_after(0.5) == course.deadline
    course.spend(5)
    assert course.is_over
    assert course.deadline_after(0.5) == float("-inf")


def test_a_stretch_ends_with_its_time_or_with_the_work_of_the_whole() -> None:
    assert not UNLIMITED.is_over
    assert Budget(0.0).for_step(1.0).is_over
    course = Budget(600.0, work_limit=10)
    budget = course.for_step(0.5)
    budget.spend(9)
    assert not budget.is_over
    budget.spend(1)
    assert budget.is_over
    assert course.is_over


def test_a_search_ends_where_little_is_left_to_gain(hard: Problem) -> None:
    moments: dict[float, list[SolverProgress]] = {0.0: [], 0.1: []}
    full, near = (solve(hard, work_limit=10**9, gap=gap, progress=reported.append) for gap, reported in moments.items())
    assert near.gap <= 0.1
    assert near.lower_bound <= full.cost <= near.cost
    assert len(moments[0.1]) < len(moments[0.0])
    with pytest.raises(SolverError, match="gap=-1 is no relative difference"):
        solve(hard, gap=-1)


def test_a_proof_ends_where_little_is_left_to_prove() -> None:
    network = Network.of(two_axes(30, labels=4, density=3.0), Tables())
    bounds = {0.5: 0, 0.0: 0}
    for gap in bounds:
        with mock.patch("autoshard.solver.bound.lower_bound", wraps=lower_bound) as bounded:
            certified = certify(network, NO_ASSIGNMENT, cap=None, budget=Budget(60.0, gap=gap).for_step(1.0))
        assert (1 - gap) * certified.best.cost <= certified.bound or gap == 0.0
        bounds[gap] = bounded.call_count
    assert bounds[0.5] < bounds[0.0]


def test_progress_is_told_as_it_moves(hard: Problem) -> None:
    moments: list[SolverProgress] = []
    solution = solve(hard, work_limit=100_000_000, progress=moments.append)
    assert moments
    assert all(moment.lower_bound <= moment.cost for moment in moments)
    costs = [moment.cost for moment in moments]
    assert costs == sorted(costs, reverse=True)
    assert solution.cost <= costs[-1]
    assert solution.lower_bound >= moments[-1].lower_bound - 1e-9


def test_an_interrupt_returns_the_best_assignment_so_far(hard: Problem) -> None:
    def interrupt(moment: SolverProgress) -> None:
        if np.isfinite(moment.cost):
            raise KeyboardInterrupt

    solution = solve(hard, progress=interrupt)
    assert solution.interrupted
    assert solution.status == "feasible"
    assert hard.feasible(solution.assignment)
    assert solution.cost == hard.cost(solution.assignment)
    assert solution.lower_bound <= solution.cost


def test_an_interrupt_without_an_assignment_goes_on_to_the_caller() -> None:
    def interrupt(_: SolverProgress) -> None:
        raise KeyboardInterrupt

    closed = Problem((np.array([1.0, 2.0]),), (), (np.array([3.0, 4.0]),), ((0, 1),), 2.0)
    with pytest.raises(KeyboardInterrupt):
        solve(closed, progress=interrupt)


@pytest.mark.parametrize("method", ["auto", "alternate"])
def test_the_same_work_gives_the_same_answer(hard: Problem, method: str) -> None:
    first, second = (solve(hard, method=method, work_limit=60_000_000, time_limit=600.0, seed=3) for _ in range(2))
    assert first.assignment == second.assignment
    assert first.lower_bound == second.lower_bound
    assert first.status == second.status


def test_no_work_at_all_is_refused() -> None:
    with pytest.raises(SolverError, match="work_limit=0 allows nothing"):
        solve(layered_problem(1), work_limit=0)
