from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from autoshard.solver import Problem, SolverError, SolverProgress, solve
from autoshard.solver.bound import certify, lower_bound
from autoshard.solver.core import Core
from autoshard.solver.local_search import NO_ASSIGNMENT
from autoshard.solver.solver_budget import UNLIMITED, Budget
from tests.solver.problems import layered_problem, two_axes, with_memory


@pytest.fixture(scope="module")
def hard() -> Problem:
    """Under a limit, and too large for the integer program at once."""
    return with_memory(two_axes(60, labels=5, density=0.9), 0.3)


def test_work_is_counted_down_in_the_whole_and_in_its_parts() -> None:
    whole = Budget.of_seconds(600.0, work_limit=10)
    # Fractions of the time would depend on the speed of the machine.
    part = whole.part(0.5, work_limit=5)
    assert part.deadline == whole.deadline
    part.spend(4)
    assert (part.work, whole.work) == (1, 6)
    part.spend(1)
    assert part.is_over
    assert not whole.is_over
    whole.spend(5)
    assert whole.is_over
    assert whole.part(1.0).is_over


def test_a_part_ends_with_its_time_or_with_the_whole() -> None:
    assert not UNLIMITED.is_over
    assert UNLIMITED.part(0.5).deadline == float("inf")
    assert Budget.of_seconds(0.0).part(1.0).is_over
    whole = Budget.of_seconds(600.0)
    part = whole.part(0.5)
    assert whole.deadline - 301.0 < part.deadline < whole.deadline - 299.0
    whole.stop()
    assert part.is_over
    assert whole.part(0.5).is_over


def test_an_interrupt_ends_the_block_and_the_search() -> None:
    budget = Budget()
    part = budget.part(1.0)
    with budget.interruptible():
        raise KeyboardInterrupt
    assert budget.interrupted
    assert part.is_over
    with pytest.raises(ZeroDivisionError), budget.interruptible():
        raise ZeroDivisionError


def test_a_search_ends_where_little_is_left_to_gain(hard: Problem) -> None:
    moments: dict[float, list[SolverProgress]] = {0.0: [], 0.1: []}
    full, near = (solve(hard, work_limit=10**9, gap=gap, progress=reported.append) for gap, reported in moments.items())
    assert near.gap <= 0.1
    assert near.lower_bound <= full.cost <= near.cost
    assert len(moments[0.1]) < len(moments[0.0])
    with pytest.raises(SolverError, match="gap=-1 is no relative difference"):
        solve(hard, gap=-1)


def test_a_proof_ends_where_little_is_left_to_prove() -> None:
    core = Core.of(two_axes(30, labels=4, density=3.0))
    bounds = {0.5: 0, 0.0: 0}
    for gap in bounds:
        with mock.patch("autoshard.solver.bound.lower_bound", wraps=lower_bound) as bounded:
            certified = certify(core, NO_ASSIGNMENT, cap=None, budget=Budget(gap=gap))
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
