"""The search for the frontier: its plans are as the planner evaluates them, and its ends are where they should be.

Mixtures of plans: everywhere as one of them, and worth their memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import numpy as np
import pytest

from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import BudgetError
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.frontier_search import FrontierSearch, frontier_plans, recombine_plans
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.plans.sharding_plan import ShardingPlan
from tests.pipeline.small_pipelines import tower
from tests.planner.steps import joint_graph, links, plan_of, planner_of

SLOW = links(bandwidth=2e9, latency=1e-6)
STEPS = [("gpt", (("x", 4),)), ("mlp", (("x", 3),))]

Mesh = tuple[tuple[str, int], ...]


def step_of(name: str) -> JointGraph:
    return joint_graph(name, batch=24, **({"layers": 1} if name == "gpt" else {}))


@functools.cache
def frontier_of(name: str, mesh: Mesh) -> tuple[FrontierSearch, list[CandidatePlan]]:
    planner = planner_of(step_of(name), dict(mesh), Constraints(planned_outputs=True), SLOW)
    search = FrontierSearch(planner, gaps=1)
    return search, search.run()


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_no_plan_beats_another_and_each_is_what_the_account_says(name: str, mesh: Mesh) -> None:
    search, plans = frontier_of(name, mesh)
    assert len(plans) > 2
    for lean, fast in itertools.pairwise(plans):
        assert lean.memory.peak < fast.memory.peak
        assert lean.step_seconds > fast.step_seconds
    for plan in plans:
        found = search.planner.evaluate(plan.decisions, plan.cost, 0.0, "given")
        assert (plan.memory, plan.step_seconds) == (found.memory, found.step_seconds)
        assert plan.lower_bound <= plan.cost * (1 + 1e-9)


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_the_fast_end_is_the_plan_without_a_limit_and_the_lean_end_what_an_error_would_name(
    name: str, mesh: Mesh
) -> None:
    asked = step_of(name), dict(mesh), Constraints(planned_outputs=True), SLOW
    plans = frontier_plans(planner_of(*asked, recompute="none"), 1)
    assert plans[-1].step_seconds <= plan_of(*asked).step_seconds
    with pytest.raises(BudgetError, match="the smallest peak") as error:
        plan_of(*asked, memory_limit=1)
    named = re.search(r"memory_limit to (\d+) bytes", str(error.value))
    assert named is not None
    assert plans[0].memory.peak <= int(named[1])


def test_a_limit_finds_hardly_anything_faster_than_the_frontier() -> None:
    plans = frontier_of(*STEPS[0])[1]
    asked = step_of("gpt"), {"x": 4}, Constraints(planned_outputs=True), SLOW
    met = 0
    for share in (0.3, 0.5, 0.7):
        limit = int(plans[0].memory.peak ** (1 - share) * plans[-1].memory.peak ** share)
        fastest = min(plan.step_seconds for plan in plans if plan.memory.peak <= limit)
        with contextlib.suppress(BudgetError):  # the lean end may be leaner than what is found under a limit
            assert fastest <= 1.02 * plan_of(*asked, memory_limit=limit).step_seconds
            met += 1
    assert met >= 2


def test_plans_in_which_operators_run_again_make_the_frontier_leaner() -> None:
    def front(recompute: str) -> list[ShardingPlan]:
        graph = joint_graph("gpt", batch=24, layers=2)
        planner = planner_of(graph, {"x": 4}, Constraints(planned_outputs=True), SLOW, recompute=recompute)
        return frontier_plans(planner, 1)

    kept, rerun = front("none"), front("auto")
    assert not any(plan.recomputed for plan in kept)
    assert any(plan.recomputed for plan in rerun)
    assert rerun[0].memory.peak < kept[0].memory.peak
    for plan in kept:
        assert (
            min(other.step_seconds for other in rerun if other.memory.peak <= plan.memory.peak)
            <= 1.01 * plan.step_seconds
        )
    for lean, fast in itertools.pairwise(rerun):
        assert lean.memory.peak < fast.memory.peak
        assert lean.step_seconds > fast.step_seconds
        assert lean.lower_bound <= lean.cost


def test_plans_that_move_values_make_the_frontier_leaner() -> None:
    def front(offload: str) -> list[ShardingPlan]:
        return frontier_plans(planner_of(graph, {"x": 2}, None, SLOW, recompute="none", offload=offload), 0)

    module, inputs = tower(4096)
    graph = capture(module, (), inputs)

    kept, moved = front("none"), front("auto")
    assert not any(plan.offloaded for plan in kept)
    assert any(plan.offloaded for plan in moved)
    assert moved[0].memory.peak < kept[0].memory.peak
    for plan in kept:
        within = [other.step_seconds for other in moved if other.memory.peak <= plan.memory.peak]
        assert min(within) <= 1.01 * plan.step_seconds
    for plan in moved:
        assert bool(plan.memory.host) == bool(plan.offloaded)
        assert plan.lower_bound <= plan.cost


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
