"""Plans within memory limits: what ranks hold under them, and how limits compare."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.errors import BudgetError
from autoshard.options.target import Settings
from autoshard.planner.budget_search import BudgetSearch
from autoshard.planner.overlap_search import OverlapSearch
from autoshard.planner.planning_problem import Constraints
from autoshard.specs.axes import MeshShape
from tests import models
from tests.memory_tracker import first_rank, track_step
from tests.planner.steps import PLENTY, MemoizingPlanner, joint_graph
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
