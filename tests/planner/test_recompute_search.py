"""Which layers a plan recomputes: as its settings say, and no more than the memory limit asks for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.recomputation import recompute_layers
from autoshard.cluster.cluster import Cluster
from autoshard.errors import BudgetError, PlanError
from autoshard.planner.recompute_search import plan_with_recompute
from autoshard.plans.sharding_plan import ShardingPlan
from tests.planner.steps import collectives_of, halves_of, joint_graph, planned_collectives, planner_of, program_of

NAMES = tuple(f"blocks.{number}" for number in range(4))


class Residual(nn.Module):
    """Layers with a wide middle, which is most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24)) for _ in NAMES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


@cache
def _graph() -> JointGraph:
    return capture(Residual(), (torch.randn(480, 24),), {})


@cache
def _planned(devices: int = 2, **settings: Any) -> ShardingPlan:
    return plan_with_recompute(planner_of(_graph(), {"x": devices}, None, Cluster.preset("h100"), **settings))


def test_without_a_limit_nothing_is_recomputed_unless_all_is_asked_for() -> None:
    assert _planned().recomputed == _planned(recompute="none").recomputed == ()
    full = _planned(recompute="full")
    assert full.recomputed == NAMES
    assert full.memory.peak < _planned().memory.peak
    assert full.cost > _planned().cost


def _between(share: float, devices: int = 2) -> int:
    """A limit between the peaks of the plans that recompute all and nothing."""
    most, least = _planned(devices).memory.peak, _planned(devices, recompute="full").memory.peak
    return int(least + share * (most - least))


@pytest.mark.parametrize("share", [1.0, 0.8, 0.0])
def test_a_limit_is_kept_by_the_faster_of_recomputing_and_what_there_is_besides(share: float) -> None:
    limit = _between(share)
    auto, others = _planned(memory_limit=limit), [_planned(recompute="full")]
    try:
        others.append(_planned(recompute="none", memory_limit=limit))
    except BudgetError:
        assert auto.recomputed
    assert auto.memory.peak <= limit
    assert auto.step_seconds <= 1.001 * min(other.step_seconds for other in others)  # as good as, whatever overlaps


def test_no_more_layers_are_recomputed_than_the_limit_asks_for() -> None:
    """On one device nothing but recomputation can keep a limit."""
    counts = []
    for share in (0.9, 0.5, 0.0):
        limit = _between(share, devices=1)
        plan = _planned(1, memory_limit=limit)
        assert plan.memory.peak <= limit
        assert plan.recomputed == NAMES[: len(plan.recomputed)]  # the earliest hold what they make longest
        counts.append(len(plan.recomputed))
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[2] <= len(NAMES)


def test_where_no_plan_fits_the_smallest_peak_is_named() -> None:
    with pytest.raises(BudgetError) as caught:
        _planned(memory_limit=10_000)
    with pytest.raises(BudgetError) as without:
        _planned(recompute="none", memory_limit=10_000)
    assert caught.value.peak is not None
    assert without.value.peak is not None
    assert caught.value.peak <= without.value.peak
    assert str(caught.value.peak) in str(caught.value)


def test_repeated_collectives_are_those_of_the_plan() -> None:
    plan = _planned(recompute="full")
    again = planner_of(recompute_layers(_graph(), plan.recomputed), {"x": 2}, None, Cluster.preset("h100"))
    assert collectives_of(*halves_of(program_of(again, plan))) == planned_collectives(plan)
    assert any(decision.node.endswith("_again") for decision in plan.choices)


def test_a_forward_pass_has_nothing_to_recompute() -> None:
    planner = planner_of(joint_graph("mlp", grad=False), {"x": 2}, recompute="full")
    assert plan_with_recompute(planner).recomputed == ()


def test_a_plan_that_recomputes_reads_back_as_it_was_written() -> None:
    plan = _planned(recompute="full")
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_what_may_be_recomputed_is_one_of_three() -> None:
    with pytest.raises(PlanError, match="recompute='some' is unknown: choose one of auto, none, full"):
        autoshard.plan(Residual(), {"x": 2}, (torch.randn(48, 24),), recompute="some")
