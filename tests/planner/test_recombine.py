"""Mixtures of plans: everywhere as one of them, and worth their memory."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.recombine import recombine_plans
from tests.planner.steps import joint_graph, links, planner_of

SLOW = links(bandwidth=2e9, latency=1e-6)


def test_mixtures_do_everywhere_as_one_of_their_plans() -> None:
    planner = planner_of(joint_graph("gpt", batch=24, layers=1), {"x": 4}, Constraints(planned_outputs=True), SLOW)
    moments = len(planner.rules.operators) + 1
    first = planner.solve(planner.constraints).decisions
    # At the price at which all that the step holds costs as much as the step.
    price = 1.0 / planner.solve(planner.constraints).memory.peak / moments * planner.solve(planner.constraints).cost
    second = planner.solve(planner.constraints, prices=np.full(moments, 30 * price)).decisions
    assert first != second
    mixed = recombine_plans(planner, planner.constraints, [first, second], np.full(moments, 1.0 / moments), 6)
    assert mixed
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    built = builder.build(frozenset({0}), reuse="all")
    ends = [built.encode(plan) for plan in (first, second)]
    for decisions, cost in mixed:
        assignment = built.encode(decisions)
        assert all(choice in pair for choice, *pair in zip(assignment, *ends, strict=True))
        assert built.problem.cost(assignment) == pytest.approx(cost, rel=1e-12)
        assert built.decode(assignment) == decisions


def test_there_are_no_mixtures_of_three_axes() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 2, "y": 2, "z": 2})
    decisions = planner.solve(planner.constraints).decisions
    assert recombine_plans(planner, planner.constraints, [decisions, decisions], np.ones(1), 4) == []
