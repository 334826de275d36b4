"""The frontier of a step: its plans are as the planner evaluates them, and its ends are where they should be."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import pytest

from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import BudgetError
from autoshard.planner.planner import Planner
from autoshard.planner.planning import explorer_for
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.sharding_plan import ShardingPlan
from tests.pipeline.small_pipelines import tower
from tests.planner.steps import joint_graph, links, plan_of, planner_of

SLOW = links(bandwidth=2e9, latency=1e-6)
STEPS = [("gpt", (("x", 4),)), ("mlp", (("x", 3),))]

Mesh = tuple[tuple[str, int], ...]


def step_of(name: str) -> JointGraph:
    return joint_graph(name, batch=24, **({"layers": 1} if name == "gpt" else {}))


@functools.cache
def frontier_of(name: str, mesh: Mesh) -> tuple[Planner, list[ShardingPlan]]:
    asked = step_of(name), dict(mesh), Constraints(planned_outputs=True), SLOW
    planner = planner_of(*asked, recompute="none")
    return planner, explorer_for(planner).frontier(4)


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_no_plan_beats_another_and_each_is_what_the_account_says(name: str, mesh: Mesh) -> None:
    planner, plans = frontier_of(name, mesh)
    assert len(plans) > 2
    for lean, fast in itertools.pairwise(plans):
        assert lean.memory.peak < fast.memory.peak
        assert lean.step_seconds > fast.step_seconds
    for plan in plans:
        found = planner.evaluate(planner.flow_of(plan).decisions, plan.cost, 0.0, "given")
        assert (plan.memory.peak, plan.step_seconds) == (found.memory.peak, found.step_seconds)
        assert plan.lower_bound <= plan.cost * (1 + 1e-9)


@pytest.mark.parametrize(("name", "mesh"), STEPS)
def test_the_fast_end_is_the_plan_without_a_limit_and_the_lean_end_what_an_error_would_name(
    name: str, mesh: Mesh
) -> None:
    asked = step_of(name), dict(mesh), Constraints(planned_outputs=True), SLOW
    plans = explorer_for(planner_of(*asked, recompute="none")).frontier(1)
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
        return explorer_for(planner).frontier(8)

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
        return explorer_for(planner_of(graph, {"x": 2}, None, SLOW, recompute="none", offload=offload)).frontier(0)

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
