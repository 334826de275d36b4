"""Stages planned within limits, one after another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Link
from autoshard.errors import BudgetError
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import cut
from autoshard.pipeline.plan.pipeline_devices import stage_target
from autoshard.pipeline.plan.stage_plans import StageBudget, StagePlanner, StageTarget
from autoshard.planner.planner import Planner
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.small_pipelines import target, tower
from tests.training import fast_links

TOO_LITTLE = StageBudget(1000, "none")


@pytest.fixture
def stages() -> list[Any]:
    module, inputs = tower()
    graph = export_forward(module, (), inputs)
    return cut(graph, balance_stages(graph, 2), 2)


def planner_on(cluster: Cluster) -> StagePlanner:
    return StagePlanner([StageTarget(stage_target(target(), cluster), MeshShape.of({"x": 2}))], [{}], None)


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
    assert leanest[0].plan.memory.peak == refused.value.peak
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
    assert again.decisions == alone.decisions
    assert served < len(solved) - before - served
