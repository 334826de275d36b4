"""Plans within a limit in which single operators run again."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.errors import BudgetError
from autoshard.planner.planning import plan_with_recompute
from autoshard.planner.rerun_context import RerunContext
from autoshard.planner.rerun_search import LayerMix, RerunSearch
from autoshard.plans.sharding_plan import ShardingPlan
from tests.planner.steps import joint_graph, planner_of


def _plan(name: str, **settings: Any) -> ShardingPlan:
    return plan_with_recompute(planner_of(joint_graph(name), {"x": 4}, **settings))


@pytest.mark.parametrize("name", ["gpt", "hf_llama"])
def test_single_operators_keep_a_limit_in_less_time_than_whole_layers(name: str) -> None:
    free = _plan(name, recompute="none")
    for share in (0.9, 0.75):
        limit = round(share * free.memory.peak)
        whole = _plan(name, memory_limit=limit)
        chosen = _plan(name, memory_limit=limit, recompute="selective")
        assert chosen.memory.peak <= limit
        assert chosen.step_seconds <= 1.005 * whole.step_seconds
        assert chosen.lower_bound <= free.cost


def test_the_same_request_gives_the_same_plan() -> None:
    limit = round(0.8 * _plan("gpt", recompute="none").memory.peak)
    first, second = (_plan("gpt", memory_limit=limit, recompute="selective") for _ in range(2))
    assert (first.recomputed, first.decisions) == (second.recomputed, second.decisions)


def test_a_limit_that_no_plan_keeps_is_an_error_with_the_smallest_peak() -> None:
    with pytest.raises(BudgetError, match="no plan fits in 1000 B per device") as raised:
        _plan("gpt", memory_limit=1000, recompute="selective")
    assert raised.value.peak is not None


def test_a_mix_has_some_layers_of_each_plan() -> None:
    planner = planner_of(joint_graph("gpt", layers=6), {"x": 4})
    context = RerunContext(planner)
    fast = planner.solve(planner.constraints)
    search = RerunSearch(context, round(0.7 * fast.memory.peak), [fast])
    search.run()
    lean = search.leanest
    mix = LayerMix(context, lean, fast)
    assert len(mix.layers) == 6
    plans = [mix.plan(count) for count in range(7)]
    peaks = [plan.memory.peak for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    assert plans[-1].memory.peak == lean.memory.peak
    rerun = [len(plan.estimate.context.graph.recomputed) for plan in plans]
    assert rerun == sorted(rerun)
    assert rerun[0] < rerun[3] < rerun[-1]
    # The cost of a mix is the sum of its parts.
    assert plans[3].cost == pytest.approx(plans[3].estimate.context.account(plans[3].decisions).total_seconds)
