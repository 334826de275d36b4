"""What is proved at loose prices, with some of the options, is true of the exact problem."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from autoshard.planner import lazy_solver
from autoshard.planner.lazy_costs import LazyCosts
from autoshard.planner.lazy_solver import solve_lazily
from autoshard.planner.planning_problem import OverlapDiscount
from autoshard.planner.solving import SolveOptions, solve_by_messages
from autoshard.solver import solve
from autoshard.solver.trws import Messages
from tests.planner.test_lazy_costs import exact, loose, planner
from tests.planner.test_tiling import built, stack_planner, tiling_of


@pytest.mark.parametrize("price", [None, 0.3])
def test_what_is_proved_is_true_of_the_exact_problem(price: float | None) -> None:
    hiding = (
        None
        if price is None
        else OverlapDiscount("reductions", np.full(len(planner().rules.operators) + 2, 1e-6), price)
    )
    asked = exact() if hiding is None else exact().with_discount(hiding)
    optimum = solve(asked.problem, time_limit=300)
    assert optimum.status == "optimal"
    answer, lessons = solve_lazily(
        LazyCosts(loose()), planner().resharder, None, SolveOptions("auto", math.inf), hiding
    )
    assert answer.lower_bound <= optimum.cost * (1 + 1e-9)
    assert answer.cost >= optimum.cost * (1 - 1e-9)
    assert asked.problem.cost(answer.assignment) == pytest.approx(answer.cost, rel=1e-9)
    plain = lessons.built.problem.cost(answer.assignment)
    assert exact().problem.cost(answer.assignment) == pytest.approx(plain, rel=1e-9)


def test_three_axes_are_planned_with_a_proof() -> None:
    plan = planner().plan()
    assert plan.gap <= 5e-3


def test_a_price_between_two_is_answered_from_what_is_near_at_either() -> None:
    search = SolveOptions("auto", math.inf)
    behind = np.full(len(planner().rules.operators) + 2, 1e-6)
    _, lessons = solve_lazily(LazyCosts(loose()), planner().resharder, None, search)
    _, lessons = solve_lazily(lessons, planner().resharder, None, search, OverlapDiscount("reductions", behind, 0.2))
    looked = len(lessons.scans)
    answer, after = solve_lazily(lessons, planner().resharder, None, search, OverlapDiscount("reductions", behind, 0.6))
    assert len(after.scans) == looked
    optimum = solve(exact().with_discount(OverlapDiscount("reductions", behind, 0.6)).problem, time_limit=300)
    assert optimum.cost * (1 - 1e-9) <= answer.cost <= optimum.cost * (1 + 1e-3)


@pytest.mark.parametrize("close", [lazy_solver.CLOSE, 1e-9])
def test_tied_layers_are_proved_at_full_depth(monkeypatch: pytest.MonkeyPatch, close: float) -> None:
    monkeypatch.setattr(lazy_solver, "CLOSE", close)
    problem, tiling = built(8), tiling_of(8)
    optimum = solve(problem.problem, time_limit=300)
    answer, _ = solve_lazily(LazyCosts(problem), stack_planner(8).resharder, tiling, SolveOptions("auto", math.inf))
    assert problem.problem.cost(answer.assignment) == pytest.approx(answer.cost, rel=1e-9)
    assert answer.lower_bound <= optimum.cost * (1 + 1e-9)
    assert optimum.cost * (1 - 1e-9) <= answer.cost <= optimum.cost * (1 + 5e-3)
    assert answer.gap <= 5e-3


@pytest.mark.parametrize("above", [1.0, 1.001])
def test_what_is_left_out_at_full_depth_does_not_raise_the_bound(monkeypatch: pytest.MonkeyPatch, above: float) -> None:
    monkeypatch.setattr(lazy_solver, "_UNTIED_ITERATIONS", 1)
    monkeypatch.setattr(lazy_solver, "CLOSE", 1e-9)
    whole, tiling, search = built(8), tiling_of(8), SolveOptions("auto", math.inf)
    exact = solve_by_messages(whole.problem, whole.program_positions, tiling, search)
    course = lazy_solver._LazySolver(LazyCosts(whole), stack_planner(8).resharder, tiling, search, None)
    course.best = dataclasses.replace(exact, cost=above * exact.cost)
    found = course._bound_in_two_passes(Messages(whole.problem, whole.program_positions), tiling.follows)
    assert found.lower_bound <= exact.cost * (1 + 1e-9)
    assert found.lower_bound >= 0.9 * exact.lower_bound
