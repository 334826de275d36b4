"""Stages planned within limits, one after another.

What stages are told that are to be planned for less memory.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link
from autoshard.errors import BudgetError
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.plan.pipeline_devices import stage_target
from autoshard.pipeline.plan.planned_stage import stage_costs
from autoshard.pipeline.plan.stage_plans import (
    RelaxedFit,
    StageBudget,
    StagePlanner,
    StageTarget,
    merge_limits,
    relaxations,
)
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes
from autoshard.planner.planner import Planner
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.small_pipelines import quick_target, tower
from tests.pipeline.test_planned_stage import FREE, links, planned
from tests.training import fast_links

TOO_LITTLE = StageBudget(1000, "none")


@pytest.fixture
def stages() -> list[Any]:
    module, inputs = tower()
    graph = capture_microbatch(module, (), inputs)
    return cut(graph, balance_stages(graph, 2), 2)


def planner_on(cluster: Cluster) -> StagePlanner:
    return StagePlanner([StageTarget(stage_target(quick_target(), cluster), MeshShape.of({"x": 2}))], [{}], None)


@pytest.fixture
def planner() -> StagePlanner:
    return planner_on(fast_links())


def test_where_no_plan_keeps_a_limit_the_leanest_will_do_if_told(stages: list[Any]) -> None:
    """Links are so slow that the fastest plan sends least, and is not the leanest."""
    slow = Link(bandwidth=1e6, latency=1e-9)
    planner = planner_on(dataclasses.replace(fast_links(), inside=slow, between=slow))
    with pytest.raises(BudgetError) as refused:
        planner.plan(stages, [TOO_LITTLE] * 2)
    leanest = planner.plan(stages, [dataclasses.replace(TOO_LITTLE, or_leanest=True)] * 2)
    assert leanest[0].plan.memory.peak <= refused.value.peak
    assert leanest[0].plan.memory.peak < planner.plan(stages, [StageBudget(None, "none")] * 2)[0].plan.memory.peak


def test_what_was_found_for_one_limit_serves_another(
    stages: list[Any], planner: StagePlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[int] = []
    solve = Planner.solve

    def counted(self: Planner, *args: Any, **kwargs: Any) -> Any:
        solved.append(1)
        return solve(self, *args, **kwargs)

    monkeypatch.setattr(Planner, "solve", counted)
    [first, _] = planner.plan(stages, [StageBudget(None, "none")] * 2)
    [leanest, _] = planner.plan(stages, [dataclasses.replace(TOO_LITTLE, or_leanest=True)] * 2)
    before = len(solved)
    room = StageBudget((first.plan.memory.peak + leanest.plan.memory.peak) // 2, "none")
    again = planner.plan(stages, [room] * 2)[0].plan
    served = len(solved) - before
    alone = StagePlanner(planner.targets, planner.pinned, None).plan(stages, [room] * 2)[0].plan
    # Plans that were met for other limits are candidates, too.
    assert room.limit is not None
    assert again.memory.peak <= room.limit
    assert again.step_seconds <= (1 + 1e-3) * alone.step_seconds
    assert served < len(solved) - before - served


MICROBATCHES = 4


def need(cost: StageCosts, flights: int) -> int:
    kept = max(cost.saved_bytes, cost.weight_saved_bytes)  # by a microbatch between the halves of its backward
    return cost.rest_bytes + max(flights * kept + cost.working_bytes, cost.application_bytes)


def test_stages_make_room_for_twice_the_microbatches_before_anything_is_run_again() -> None:
    stages = planned(2, x=2)
    costs = [stage_costs(one, links(pp=2, x=2), MICROBATCHES) for one in stages]
    received = rest_bytes([dataclasses.replace(cost, rest_bytes=0) for cost in costs], (0, 1), MICROBATCHES)
    flights = (2, 1)
    once = [need(cost, count) for cost, count in zip(costs, flights, strict=True)]
    twice = [need(cost, 2 * count) for cost, count in zip(costs, flights, strict=True)]
    loose, between, roomy, limited, *_ = relaxations("auto")

    def fitted(needs: list[int]) -> RelaxedFit:
        memories = [one + more for one, more in zip(needs, received, strict=True)]
        return RelaxedFit(stages, costs, flights, MICROBATCHES, memories)

    rooms = [FREE, FREE]
    assert limited(fitted(once), rooms) == rooms, "what is under way in turn fits"
    assert roomy(fitted(twice), rooms) == rooms
    for place, one in enumerate(roomy(fitted(once), rooms)):
        count, cost = 2 * flights[place], costs[place]
        assert one.under_way == count
        # The plan counts what every microbatch saves; what is there beside that has no room in its limit.
        beside = twice[place] - stages[place].plan.memory.peak - (count - 1) * cost.saved_bytes
        assert one == dataclasses.replace(FREE, limit=once[place] - beside, under_way=count, or_leanest=True)
    limits = [[room.limit for room in rung(fitted(once), rooms)] for rung in (loose, between, roomy)]
    for room, half, all_ in zip(*limits, strict=True):
        assert all_ is not None, "what is kept between the halves of backward has room there"
        assert room is None or half is None or room >= half >= all_


def test_stages_that_are_alike_share_the_least_of_near_limits() -> None:
    rooms = [StageBudget(96 - count, "auto", under_way=count) for count in (6, 5, 4, 3, 2, 1)]
    given = merge_limits(rooms, ["middle"] * 6)
    assert [(room.limit, room.under_way) for room in given] == [(90, 6), (90, 6), (92, 4), (92, 4), (94, 2), (94, 2)]


def test_other_stages_keep_their_own() -> None:
    rooms = [
        StageBudget(None, "none"),
        StageBudget(9, "auto"),
        StageBudget(8, "auto"),
        StageBudget(7, "none"),
        StageBudget(6, "auto", target=1),
    ]
    assert merge_limits(rooms, ["a", "a", "b", "a", "a"]) == rooms
    few = [StageBudget(limit, "auto", under_way=count) for limit, count in ((9, 4), (8, 3), (7, 2), (6, 1))]
    assert merge_limits(few, ["a"] * 4) == few
