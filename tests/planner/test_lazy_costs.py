"""Loose prices that are learned: never above exact ones, and exact where they were learned."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from autoshard.planner.lazy_costs import LazyCosts, OptionScan
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import BuiltProblem, HideableKind, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from tests.planner.steps import joint_graph, links, planner_of

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
