"""The error of a limit that no plan fits names remedies that were tried, with the peaks that they lead to."""

from __future__ import annotations

import re

import pytest
from torch.distributed.tensor import Shard

from autoshard.errors import BudgetError
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.recompute_search import plan_with_recompute
from autoshard.units import parse_bytes
from tests.planner.steps import joint_graph, planner_of


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
