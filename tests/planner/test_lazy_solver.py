"""Bounds at lower bounds of prices, with some of the options, hold for the exact problem.

Prices that are learned are never above exact ones, and exact where they were learned.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from autoshard.planner import lazy_solver
from autoshard.planner.lazy_solver import LazyCosts, LazySolver, OptionScan
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import BuiltProblem, HideableKind, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.solving import SolveOptions, solve_by_messages
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.solver import solve
from autoshard.solver.reduced_problem import ReducedProblem
from autoshard.solver.solver_budget import Budget
from tests.planner.steps import joint_graph, links, planner_of
from tests.planner.test_tiling import built, stack_planner, tiling_of

AXES = frozenset({0, 1, 2})


@functools.cache
def planner() -> Planner:
    return planner_of(joint_graph("mlp"), {"a": 2, "b": 2, "c": 2}, cluster=links(4e9, 1e-6))


@functools.cache
def loose() -> BuiltProblem:
    """Collectives at half their prices, so that there is much to learn."""
    one = planner()

    def half(kind: str, amount: int, axis: int) -> float:
        return 0.5 * one.cost.collective(kind, amount, axis)

    def half_gradient(kind: str, amount: int, axis: int) -> float:
        return 0.5 * one.cost.gradient_collective(kind, amount, axis)

    resharder = LowerBoundResharder(one.mesh, half, half_gradient)
    return ProblemBuilder(one.rules, one.tables, resharder, one.constraints).build(AXES)


def exact() -> BuiltProblem:
    return planner().builder.build(AXES)


def test_both_problems_have_the_same_options() -> None:
    assert [one.options for one in loose().variables] == [one.options for one in exact().variables]
    ends = [[(edge.source, edge.target) for edge in built.problem.edges] for built in (loose(), exact())]
    assert ends[0] == ends[1]


def test_no_price_is_above_the_exact_one() -> None:
    for cheap, true in zip(loose().problem.edges, exact().problem.edges, strict=True):
        assert np.all(cheap.costs <= true.costs * (1 + 1e-9) + 1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_what_was_learned_is_exact(seed: int) -> None:
    random = np.random.default_rng(seed)
    assignment = [int(random.integers(len(vector))) for vector in loose().problem.costs]
    lazy_costs = LazyCosts(loose()).with_exact_costs(assignment, planner().resharder)
    assert lazy_costs is not None
    assert lazy_costs.built.problem.cost(assignment) == pytest.approx(exact().problem.cost(assignment), rel=1e-9)
    assert lazy_costs.with_exact_costs(assignment, planner().resharder) is None
    for learned, true in zip(lazy_costs.built.problem.edges, exact().problem.edges, strict=True):
        assert np.all(learned.costs <= true.costs * (1 + 1e-9) + 1e-15)


def test_between_prices_that_were_looked_at_what_is_near_at_any_is_near() -> None:
    first, second, third = (np.array(places) for places in ([0, 2], [1, 2], [4]))

    def discount(price: float, kind: HideableKind = "reductions") -> OverlapDiscount:
        return OverlapDiscount(kind, np.zeros(1), price)

    scans = (OptionScan(None, [first]), OptionScan(discount(0.2), [third]), OptionScan(discount(0.5), [second]))
    lazy_costs = LazyCosts(loose(), scans=scans)
    between = lazy_costs.near_options(discount(0.7))
    assert between is not None
    assert [options.tolist() for options in between] == [[0, 1, 2, 4]]
    assert lazy_costs.near_options(discount(0.1)) is None
    assert lazy_costs.near_options(discount(0.7, "gathers")) is None
    assert LazyCosts(loose()).near_options(discount(0.5)) is None


@pytest.mark.parametrize("price", [None, 0.3])
def test_what_is_proved_is_true_of_the_exact_problem(price: float | None) -> None:
    discount = (
        None
        if price is None
        else OverlapDiscount("reductions", np.full(len(planner().rules.operators) + 2, 1e-6), price)
    )
    asked = exact() if discount is None else exact().with_discount(discount)
    optimum = solve(asked.problem, time_limit=300)
    assert optimum.status == "optimal"
    solver = LazySolver(LazyCosts(loose()), planner().resharder, None, SolveOptions("auto", Budget()), discount)
    answer = solver.run()
    assert answer.lower_bound <= optimum.cost * (1 + 1e-9)
    assert answer.cost >= optimum.cost * (1 - 1e-9)
    assert asked.problem.cost(answer.assignment) == pytest.approx(answer.cost, rel=1e-9)
    plain = solver.lazy_costs.built.problem.cost(answer.assignment)
    assert exact().problem.cost(answer.assignment) == pytest.approx(plain, rel=1e-9)


def test_three_axes_are_planned_with_a_proof() -> None:
    plan = planner().plan()
    assert plan.gap <= 5e-3


def test_a_price_between_two_is_answered_from_what_is_near_at_either() -> None:
    search = SolveOptions("auto", Budget())
    behind = np.full(len(planner().rules.operators) + 2, 1e-6)
    lazy_costs = LazyCosts(loose())
    for discount in (None, OverlapDiscount("reductions", behind, 0.2)):
        solver = LazySolver(lazy_costs, planner().resharder, None, search, discount)
        solver.run()
        lazy_costs = solver.lazy_costs
    scans = len(lazy_costs.scans)
    solver = LazySolver(lazy_costs, planner().resharder, None, search, OverlapDiscount("reductions", behind, 0.6))
    answer = solver.run()
    assert len(solver.lazy_costs.scans) == scans
    optimum = solve(exact().with_discount(OverlapDiscount("reductions", behind, 0.6)).problem, time_limit=300)
    assert optimum.cost * (1 - 1e-9) <= answer.cost <= optimum.cost * (1 + 1e-3)


@pytest.mark.parametrize("close", [lazy_solver.CLOSE, 1e-9])
def test_tied_layers_are_proved_at_full_depth(monkeypatch: pytest.MonkeyPatch, close: float) -> None:
    monkeypatch.setattr(lazy_solver, "CLOSE", close)
    problem, tiling = built(8), tiling_of(8)
    optimum = solve(problem.problem, time_limit=300)
    search = SolveOptions("auto", Budget())
    answer = LazySolver(LazyCosts(problem), stack_planner(8).resharder, tiling, search).run()
    assert problem.problem.cost(answer.assignment) == pytest.approx(answer.cost, rel=1e-9)
    assert answer.lower_bound <= optimum.cost * (1 + 1e-9)
    assert optimum.cost * (1 - 1e-9) <= answer.cost <= optimum.cost * (1 + 5e-3)
    assert answer.gap <= 5e-3


@pytest.mark.parametrize("above", [1.0, 1.001])
def test_what_is_left_out_at_full_depth_does_not_raise_the_bound(monkeypatch: pytest.MonkeyPatch, above: float) -> None:
    monkeypatch.setattr(lazy_solver, "UNTIED_ITERATIONS", 1)
    monkeypatch.setattr(lazy_solver, "CLOSE", 1e-9)
    whole, tiling, search = built(8), tiling_of(8), SolveOptions("auto", Budget())
    problem = ReducedProblem.of(whole.problem, whole.program_positions)
    exact = solve_by_messages(problem, tiling.tie(problem), search)
    solver = LazySolver(LazyCosts(whole), stack_planner(8).resharder, tiling, search)
    solver.best = dataclasses.replace(exact, cost=above * exact.cost)
    found = solver.bound_in_two_passes(None, tiling.follows)
    assert found.lower_bound <= exact.cost * (1 + 1e-9)
    assert found.lower_bound >= 0.9 * exact.lower_bound
