"""Plans within a limit: what they take beside whole layers, their order, and plans that are spliced."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from autoshard.capture.joint import capture
from autoshard.errors import BudgetError
from autoshard.planner.limit_search import LimitSearch
from autoshard.planner.planning import plan_with_recompute
from autoshard.planner.rerun_context import RerunContext, RouteError
from autoshard.planner.splice import Splice
from autoshard.plans.sharding_plan import ShardingPlan
from tests.models import ZOO
from tests.planner.steps import joint_graph, planner_of


def _plan(name: str, **settings: Any) -> ShardingPlan:
    return plan_with_recompute(planner_of(joint_graph(name), {"x": 4}, **settings))


@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_single_operators_keep_a_limit_in_less_time_than_whole_layers(name: str) -> None:
    free = _plan(name, recompute="none")
    for share in (0.9, 0.75):
        limit = round(share * free.memory.peak)
        whole = _plan(name, memory_limit=limit, recompute="full")
        chosen = _plan(name, memory_limit=limit)
        assert chosen.memory.peak <= limit
        assert chosen.step_seconds <= 1.005 * whole.step_seconds
        assert chosen.lower_bound <= free.cost


def test_the_same_request_gives_the_same_plan() -> None:
    limit = round(0.8 * _plan("gpt", recompute="none").memory.peak)
    first, second = (_plan("gpt", memory_limit=limit) for _ in range(2))
    assert (first.recomputed, first.decisions) == (second.recomputed, second.decisions)


def test_a_limit_that_no_plan_keeps_is_an_error_with_the_smallest_peak() -> None:
    with pytest.raises(BudgetError, match="no plan fits in 1000 B per device") as raised:
        _plan("gpt", memory_limit=1000)
    assert raised.value.peak is not None


def test_a_splice_has_the_first_operators_of_one_plan_and_the_others_of_another() -> None:
    planner = planner_of(joint_graph("gpt", layers=6), {"x": 4})
    context = RerunContext(planner)
    fast = planner.solve(planner.constraints)
    lean = LimitSearch(context, 1, [fast]).leanest
    splice = Splice(context, lean, fast)
    assert splice.length == sum(planner.graph.phase(node) == "forward" for node in planner.rules.operators)
    plans = [splice.plan(splice.length * part // 6) for part in range(7)]
    peaks = [plan.memory.peak for plan in plans]
    # A cut in the middle of a layer may hold the results of both sides.
    assert all(later <= 1.05 * earlier for earlier, later in itertools.pairwise(peaks))
    assert plans[-1].memory.peak == lean.memory.peak
    assert plans[0].memory.peak == fast.memory.peak
    # The two plans tell the peaks of those between them, but for what lies beside each other at the seam.
    foreseen = [splice.foreseen_peak(splice.length * part // 6) for part in range(7)]
    assert foreseen == pytest.approx(peaks, rel=0.03)
    assert splice.fewest_within(peaks[3], 0, splice.length) == pytest.approx(splice.length // 2, abs=splice.length // 6)
    rerun = [len(plan.estimate.context.graph.recomputed) for plan in plans]
    assert rerun == sorted(rerun)
    assert rerun[0] < rerun[3] < rerun[-1]
    # No part is dearer than in the plan that it is of, but for what lies between.
    for plan in plans:
        assert plan.step_seconds <= 1.02 * max(fast.step_seconds, lean.step_seconds)
        assert plan.cost == pytest.approx(plan.estimate.context.account(plan.decisions).total_seconds)


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 4}, {"x": 4, "y": 2}])
def test_a_seam_within_a_route_of_rows_makes_no_plan(mesh: dict[str, int]) -> None:
    module, inputs = ZOO["hf_mixtral"](experts="grouped_mm")
    context = RerunContext(planner_of(capture(module, (), inputs, grad=True), mesh))
    fast = context.without.solve(context.without.constraints)
    search = LimitSearch(context, round(0.8 * fast.memory.peak), [fast])
    assert search.run() is not None
    plans = sorted(search.met, key=lambda plan: plan.memory.peak)
    within_routes = 0
    for lean, other in itertools.permutations(plans[:: max(1, len(plans) // 5)], 2):
        splice = Splice(context, lean, other)
        for part in range(1, 8):
            try:
                assert splice.plan(splice.length * part // 8).memory.peak > 0
            except RouteError:
                within_routes += 1
    assert within_routes  # else nothing is shown


def test_an_operator_of_the_backward_half_lies_beside_that_whose_gradient_it_makes() -> None:
    context = RerunContext(planner_of(joint_graph("hf_llama", layers=4), {"x": 4}))
    rules, places = context.without.rules, context.forward_places
    assert places.keys() >= {node.name for node in rules.operators if context.graph.phase(node) == "forward"}

    def layer(path: str) -> int | None:
        found = re.search(r"layers\.(\d+)\.", path)
        return None if found is None else int(found[1])

    # Rotary frequencies, which all layers read, are made in front of the first.
    begin: dict[int, int] = {}
    for node in rules.operators:
        number = layer(context.graph.module_path(node))
        if number is not None and context.graph.phase(node) == "forward":
            begin.setdefault(number, places[node.name])
    checked = 0
    for node in rules.operators:
        number = layer(context.graph.module_path(node))
        if number is not None and context.graph.phase(node) == "backward":
            assert begin[number] <= places[node.name] <= begin.get(number + 1, len(places)) + 8, node
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_every_plan_met_is_an_assignment_of_the_whole_problem(name: str) -> None:
    planner = planner_of(joint_graph(name, layers=2), {"x": 4})
    context, free = RerunContext(planner), planner.solve(planner.constraints)
    search = LimitSearch(context, round(0.7 * free.memory.peak), [free, context.whole_layers])
    assert search.run() is not None
    built = context.builder.build(frozenset(context.axes), reuse="all")
    # Spliced ones, those of whole layers, and those in which nothing runs again are among them.
    assert len(search.met) > 5
    for plan in search.met:
        assignment = context.assignment_of(plan, built)
        assert assignment is not None, plan.method
        # The problem breaks ties: a parameter in shards costs the launch of a kernel.
        assert built.problem.cost(assignment) == pytest.approx(plan.cost, rel=1e-3), plan.method


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.65), ("hf_llama", 0.57), ("hf_gpt2", 0.85)])
def test_recombined_plans_cost_what_their_programs_cost(name: str, share: float) -> None:
    planner = planner_of(joint_graph(name), {"x": 4})
    context, free = RerunContext(planner), planner.solve(planner.constraints)
    search = LimitSearch(context, round(share * free.memory.peak), [free, context.whole_layers])
    search._generate()
    before = search.best
    assert before is not None
    search._recombine()
    found = [plan for plan in search.met if plan.method == "plans recombined"]
    assert found
    for plan in found:
        assert plan.cost == pytest.approx(plan.estimate.context.account(plan.decisions).total_seconds, rel=1e-3)
    assert search.best is not None
    assert search.best.step_seconds <= before.step_seconds
