"""Plans under a limit: those that move values to the host are never slower than others, and refused in words."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import autoshard
from autoshard.errors import BudgetError, HintError, PlanError
from autoshard.plans.sharding_plan import ShardingPlan
from tests import models
from tests.memory_models import build
from tests.training import fast_links

MESH = {"x": 2}


@cache
def _plan(limit: int | None, recompute: str = "none", offload: str = "none", **options: Any) -> ShardingPlan:
    module, inputs = build("GPT")
    options |= {"memory_limit": limit, "recompute": recompute, "offload": offload, "cluster": fast_links()}
    return autoshard.plan(module, MESH, (), inputs, optimizer="sgd", **options)


def _least(recompute: str) -> int:
    """Return the smallest peak without moves."""
    with pytest.raises(BudgetError) as caught:
        _plan(1, recompute)
    assert caught.value.peak is not None
    return caught.value.peak


@pytest.mark.parametrize(
    "recompute", ["none", "selective", *(pytest.param(each, marks=pytest.mark.slow) for each in ("auto", "full"))]
)
def test_a_plan_that_may_move_values_is_never_slower(recompute: str) -> None:
    without = _plan(None, recompute)
    limit = (without.memory.peak + _least(recompute)) // 2
    plans = [_plan(limit, recompute, offload) for offload in ("none", "auto")]
    assert plans[1].step_seconds <= plans[0].step_seconds * (1 + 1e-9)
    assert all(plan.memory.peak <= limit for plan in plans)


def test_values_are_moved_where_nothing_else_keeps_the_limit() -> None:
    limit = _least("none") * 9 // 10
    plan = _plan(limit, "none", "auto")
    assert plan.memory.peak <= limit
    assert plan.offloaded
    assert not plan.recomputed
    assert plan.memory.host > 0
    assert f"{len(plan.offloaded)} tensors, " in str(plan)
    again = ShardingPlan.from_json(plan.to_json())
    assert (again.offloaded, again.memory.host) == (plan.offloaded, plan.memory.host)


def test_what_is_too_little_is_said_with_the_leanest_plan_met() -> None:
    with pytest.raises(BudgetError, match="the smallest peak found is") as caught:
        _plan(1_000_000, "none", "auto")
    assert caught.value.peak is not None
    assert caught.value.peak < _least("none")
    # The limit that is named is one within which there is a plan.
    assert _plan(caught.value.peak, "none", "auto").memory.peak <= caught.value.peak
    assert "offload" not in str(caught.value)
    with pytest.raises(BudgetError, match=r"move tensors to the host \(offload=\"auto\" needs"):
        _plan(1_000_000, "none")


def test_the_host_is_filled_as_far_as_it_has_room() -> None:
    limit = _least("none") * 95 // 100
    free = _plan(limit, "none", "auto")
    room = free.memory.host * 3 // 4
    plan = _plan(limit, "selective", "auto", host_memory=room)
    assert plan.memory.host <= room
    module, inputs = build("GPT")
    options: dict[str, Any] = {"hints": {"*": autoshard.offload()}, "cluster": fast_links()}
    moved = autoshard.plan(module, MESH, (), inputs, **options).memory.host
    assert autoshard.plan(module, MESH, (), inputs, **options, host_memory=moved).memory.host == moved
    with pytest.raises(BudgetError, match=r"moves .* of every device to its host, which has .* for it \(host_memory"):
        autoshard.plan(module, MESH, (), inputs, **options, host_memory=moved - 1)


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.norm = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


def test_a_hint_moves_what_its_modules_save() -> None:
    x, twice = torch.randn(8, 16), _Twice()

    def plan(hints: dict[str, Any], **options: Any) -> ShardingPlan:
        return autoshard.plan(twice, MESH, (x,), hints=hints, cluster=fast_links(), **options)

    second = plan({"layers.1*": autoshard.offload()})
    both = plan({"layers.*": autoshard.offload()})
    assert set(second.offloaded) < set(both.offloaded)
    assert second.hints == {"layers.1*": "offload()"}
    paths = {choice.node: choice.module for choice in second.choices}
    assert {paths[name].split(".")[1] for name in second.offloaded} == {"1"}
    # What moves would cost, asked of a plan without them, and of one that has them.
    cost = plan({"layers.0.0.weight": (Replicate(),)}).why_not({"layers.*": autoshard.offload()})
    assert cost.plan is not None
    assert set(cost.plan.offloaded) == set(both.offloaded)
    assert both.why_not({"layers.1*": autoshard.offload()}).plan is both
    with pytest.raises(HintError, match="matches no module"):
        plan({"blocks.*": autoshard.offload()})
    with pytest.raises(HintError, match="moves nothing"):
        plan({"norm": autoshard.offload()})
    # Evaluation saves nothing: there is nothing to move.
    with torch.no_grad():
        module, inputs = models.mlp()
        assert not autoshard.plan(module.eval(), MESH, (), inputs, hints={"*": autoshard.offload()}).offloaded


def test_copies_hide_beside_compute_as_far_as_the_link_carries_them() -> None:
    x = torch.randn(64, 16)

    def plan(bandwidth: float, hints: dict[str, Any] | None = None, **options: Any) -> ShardingPlan:
        cluster = fast_links()
        cluster = replace(cluster, device=replace(cluster.device, host_bandwidth=bandwidth, kernel_overhead=1e-9))
        return autoshard.plan(_Twice(), {"x": 1}, (x,), hints=hints, cluster=cluster, **options)

    hints = {"layers.*": autoshard.offload()}
    without, fast, slow = plan(1e15), plan(1e15, hints), plan(1e6, hints)
    assert fast.step_seconds == pytest.approx(without.step_seconds, rel=1e-2)
    one_way = slow.memory.host / 1e6
    # Both directions at once would not do: what comes back was there before.
    assert 2 * one_way < slow.step_seconds < 2 * one_way + without.step_seconds
    assert slow.step_replay.exposed > 1.5 * one_way
    # A compiled program waits for every copy.
    medium = one_way * 1e6 / without.step_seconds * 4
    beside, waiting = (plan(medium, hints, compile=compiled) for compiled in (False, True))
    assert beside.step_seconds < without.step_seconds * 1.4
    assert waiting.step_seconds > plan(medium, compile=True).step_seconds + 2 * waiting.memory.host / medium


def test_pipelines_move_nothing() -> None:
    x = torch.randn(8, 16)
    for options in ({"offload": "auto"}, {"hints": {"layers.*": autoshard.offload()}}):
        with pytest.raises(PlanError, match="its stages keep their tensors on the device"):
            autoshard.plan(_Twice(), {"pp": 2}, (x,), cluster=fast_links(), **options)
    with pytest.raises(PlanError, match="offload='all' is unknown: choose one of none, auto"):
        autoshard.plan(_Twice(), MESH, (x,), offload="all")  # type: ignore[arg-type]
