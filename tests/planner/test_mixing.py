"""Mixtures of plans: everywhere as one of them, and worth their memory."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.planner.building import ProblemBuilder
from autoshard.planner.mixing import mixtures
from autoshard.planner.problem import Wishes
from tests.planner.steps import captured, links, planner_of

SLOW = links(bandwidth=2e9, latency=1e-6)


def test_mixtures_do_everywhere_as_one_of_their_plans() -> None:
    planner = planner_of(captured("gpt", batch=24, layers=1), {"x": 4}, Wishes(planned_outputs=True), SLOW)
    moments = len(planner.rules.operators) + 1
    first = planner.solve(planner.wishes).decisions
    # At the price at which all that the step holds costs as much as the step.
    price = 1.0 / planner.solve(planner.wishes).memory.peak / moments * planner.solve(planner.wishes).cost
    second = planner.solve(planner.wishes, prices=np.full(moments, 30 * price)).decisions
    assert first != second
    mixed = mixtures(planner, planner.wishes, [first, second], np.full(moments, 1.0 / moments), 6)
    assert mixed
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.wishes)
    built = builder.build(frozenset({0}), reuse="all")
    ends = [built.encode(plan) for plan in (first, second)]
    for decisions, cost in mixed:
        assignment = built.encode(decisions)
        assert all(choice in pair for choice, *pair in zip(assignment, *ends, strict=True))
        assert built.problem.cost(assignment) == pytest.approx(cost, rel=1e-12)
        assert built.decode(assignment) == decisions


def test_there_are_no_mixtures_of_three_axes() -> None:
    planner = planner_of(captured("mlp"), {"x": 2, "y": 2, "z": 2})
    decisions = planner.solve(planner.wishes).decisions
    assert mixtures(planner, planner.wishes, [decisions, decisions], np.ones(1), 4) == []
