"""Planners of the calls of one module: they share tables, and none changes the plans of the others.

Cycles that planning makes are freed while it runs; those of older objects are freed later. A plan recomputes layers as
its settings say, and no more of them than the memory limit asks for.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
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
from autoshard.options.target import Target
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache, freeze_older_objects, plan_with_recompute, run_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.planner.steps import collectives_of, halves_of, joint_graph, planned_collectives, planner_of, program_of
from tests.targets import target
from tests.training import build

MESH = MeshShape.of({"a": 2, "b": 2})


def _target(**changes: Any) -> Target:
    return target("cpu", effort="fast", **changes)


def _graphs(module: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    half = {name: tensor[: len(tensor) // 2] for name, tensor in inputs.items()}
    return [capture(module, (), call, grad=grad) for call, grad in ((inputs, True), (inputs, False), (half, True))]


def test_later_calls_are_planned_as_if_they_were_the_first_from_what_was_worked_out_before() -> None:
    module, inputs = build("mlp")
    options = _target()
    planners = PlannerCache(module, MESH)
    first: Planner | None = None
    for graph in _graphs(module, inputs):
        planner = planners.of(graph, options)
        first = first or planner
        assert planner.resharder is first.resharder
        found = run_planner(planner, 0.0, options)
        alone = run_planner(PlannerCache(module, MESH).of(graph, options), 0.0, options)
        assert replace(found, timings={}) == replace(alone, timings={})
    assert first is not None
    assert first.best is not None
    planners.forget()
    assert first.best is None


def test_planners_at_other_prices_work_out_their_own() -> None:
    module, inputs = build("mlp")
    graph = capture(module, (), inputs)
    planners = PlannerCache(module, MESH)
    one, other = (planners.of(graph, _target(optimizer=optimizer)) for optimizer in ("adamw", "sgd"))
    assert one.resharder is not other.resharder


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def _dropped() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """Nothing frozen, as in a user's process: the test session freezes all objects before its first test."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, *thresholds[1:])
    yield
    gc.set_threshold(*thresholds)
    gc.freeze()


def test_only_newer_cycles_are_freed_inside_and_older_ones_after(nothing_set_aside: None) -> None:
    thresholds = gc.get_threshold()
    older = _dropped()
    with freeze_older_objects():
        with freeze_older_objects():
            newer = _dropped()
        gc.collect()
        assert newer() is None
        assert older() is not None
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
    gc.collect()
    assert older() is None


def test_what_others_set_aside_stays_so() -> None:
    assert gc.get_freeze_count() > 0
    with freeze_older_objects():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0


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


def test_no_more_is_recomputed_than_the_limit_asks_for() -> None:
    """On one device nothing but recomputation can keep a limit."""
    counts = []
    for share in (0.9, 0.5, 0.0):
        limit = _between(share, devices=1)
        plan = _planned(1, memory_limit=limit)
        assert plan.memory.peak <= limit
        counts.append(plan.cost)
    assert counts == sorted(counts)
    assert _planned(1).cost < counts[0] < counts[2] <= _planned(1, recompute="full").cost


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
