"""Plans within memory limits: what ranks hold under them, and how limits compare.

The error of a limit that no plan fits names remedies that were tried, with the peaks that they lead to.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.errors import BudgetError
from autoshard.options.target import Settings
from autoshard.planner.budget_search import BudgetSearch
from autoshard.planner.planner import OverlapSearch
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.recompute_search import plan_with_recompute
from autoshard.specs.axes import MeshShape
from autoshard.units import parse_bytes
from tests import models
from tests.memory_tracker import first_rank, track_step
from tests.planner.steps import PLENTY, MemoizingPlanner, joint_graph, planner_of
from tests.training import fast_links

LIMITS = 8


def _measured(
    name: str, options: dict[str, Any], sizes: dict[str, int], cluster: Cluster, plan: autoshard.ShardingPlan
) -> int:
    """Bytes that the first rank holds at most in a step under a plan."""
    module, inputs = models.ALL[name](**options)
    with first_rank(sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=cluster, plan=plan)
        return track_step(module, inputs, torch.optim.AdamW(module.parameters())).peak.bytes


@pytest.mark.parametrize(
    ("name", "options", "sizes", "cluster"),
    [
        ("mlp", {"batch": 120}, {"x": 2}, fast_links()),
        pytest.param("gpt", {"layers": 1}, {"x": 4}, Cluster.preset("a100"), marks=pytest.mark.slow),
    ],
    ids=["mlp", "gpt"],
)
def test_limits_are_kept_by_plans_no_slower_than_the_leanest(
    name: str, options: dict[str, Any], sizes: dict[str, int], cluster: Cluster
) -> None:
    graph = joint_graph(name, **options)
    planner = MemoizingPlanner(graph, MeshShape.of(sizes), cluster, Constraints(), Settings(time_limit=PLENTY))
    cheapest = planner.solve(planner.constraints)
    fastest = OverlapSearch(planner, cheapest).run()
    with pytest.raises(BudgetError, match="Raise memory_limit to") as caught:
        BudgetSearch(planner, 1000, cheapest, fastest).run()
    least = int(str(caught.value).split("memory_limit to ")[1].split(" ")[0])
    measured: dict[str, int] = {}
    rows = []
    for limit in np.linspace(fastest.memory.peak - 1, least, LIMITS).astype(int):
        plan = planner.describe(BudgetSearch(planner, int(limit), cheapest, fastest).run())
        decisions = json.dumps(plan.decisions)
        if decisions not in measured:
            measured[decisions] = _measured(name, options, sizes, cluster, plan)
        held = measured[decisions]
        assert plan.memory.peak <= limit
        assert held == pytest.approx(plan.memory.peak, rel=0.01)
        rows.append((plan.step_seconds, held))
    assert len(set(rows)) > 1
    assert max(seconds for seconds, _ in rows) == rows[-1][0]


def _said(recompute: str) -> str:
    planner = planner_of(joint_graph("gpt", layers=2, batch=32), {"x": 2}, memory_limit=1000, recompute=recompute)
    with pytest.raises(BudgetError) as caught:
        plan_with_recompute(planner)
    return str(caught.value)


def test_recomputation_is_named_with_a_limit_that_it_keeps() -> None:
    said = re.search(r'allow recomputation \(recompute="full" needs ([^)]+)\)', _said("none"))
    assert said is not None
    limit = int(1.05 * parse_bytes(said[1]))  # one decimal is said
    graph = joint_graph("gpt", layers=2, batch=32)
    assert plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="full")).memory.peak <= limit
    with pytest.raises(BudgetError):
        plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="none"))


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_what_was_asked_for_already_is_no_way_out(recompute: str) -> None:
    said = _said(recompute)
    assert "add devices (x=4 needs" in said
    assert "recomputation" not in said


def test_more_devices_than_what_is_pinned_can_lie_on_are_not_tried() -> None:
    graph = joint_graph("mlp")
    name = next(item.name for item in graph.inputs if item.kind == "parameter" and item.node.meta["val"].shape[0] == 24)
    planner = planner_of(graph, {"x": 4, "y": 2}, Constraints(pinned={name: (Shard(0), Shard(0))}), memory_limit=1000)
    with pytest.raises(BudgetError, match="add devices, or"):
        plan_with_recompute(planner)
