"""Whole logits or a loss in pieces: the plan is the faster one of both that fits, and no form is planned in vain."""

from __future__ import annotations

import copy
import math
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard
from autoshard.capture.bound_call import BoundCall
from autoshard.errors import BudgetError
from autoshard.operators.large_losses import loss_in_pieces, loss_operator
from autoshard.options.options import collect_options
from autoshard.options.target import Target
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.shares import plan_shares
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from tests.runtime.meshes import per_rank, simulated_mesh

CLASSES, TOKENS = 2**15, 2**15
LOGITS = CLASSES * TOKENS // 2 * 4
"""Bytes of a device."""


class Narrow(nn.Module):
    """A small model of a large vocabulary."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(64, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layers(self.table(tokens))), tokens)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_in_pieces, "FEW_LOGITS", 2**20)


def plan(limit: int | None = None) -> ShardingPlan:
    with torch.device("meta"):
        module, tokens = Narrow(), torch.empty(TOKENS, dtype=torch.int64)
    return autoshard.plan(module, {"dp": 2}, (tokens,), cluster="h100", memory_limit=limit)


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("the other form was captured")


def test_whole_logits_that_fit_are_planned_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModulePlanner, "_other_form", _refuse)
    whole = plan()
    assert not whole.is_in_pieces
    assert whole.memory.peak > 2 * LOGITS
    assert plan(whole.memory.peak).fingerprint == whole.fingerprint


def test_logits_that_no_device_has_room_for_are_planned_in_pieces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModulePlanner, "_other_form", _refuse)
    found = plan(2 * LOGITS)
    assert found.is_in_pieces
    assert found.memory.peak < LOGITS


@pytest.mark.parametrize("share", [0.99, 0.9, 0.75])
def test_the_faster_form_within_a_limit_is_taken(share: float) -> None:
    limit = round(share * plan().memory.peak)
    with torch.device("meta"):
        module, tokens = Narrow(), torch.empty(TOKENS, dtype=torch.int64)
    mesh, options = MeshShape.of({"dp": 2}), collect_options("plan", {"cluster": "h100", "memory_limit": limit})
    planner = ModulePlanner(module, mesh, Target.of(options, None))
    steps: dict[float, float] = {}
    for room in (0.0, math.inf):
        try:
            steps[room] = plan_shares(
                planner.capture(BoundCall.of(module, (tokens,), {}), logits_room=room)
            ).step_seconds
        except BudgetError:
            steps[room] = math.inf
    found = plan(limit)
    assert found.memory.peak <= limit
    assert found.step_seconds == min(steps.values())
    assert found.is_in_pieces == (steps[0.0] < steps[math.inf])


def test_calls_of_a_module_have_the_numbers_of_one_device_in_the_form_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 64)
    monkeypatch.setattr(loss_in_pieces, "FEW_LOGITS", 2**10)
    monkeypatch.setattr(ModulePlanner, "logits_room", math.inf)  # so that whole logits come first
    module = Narrow(classes=512).double()
    alone = copy.deepcopy(module)
    tokens = torch.randint(0, 512, (2048,), generator=torch.Generator().manual_seed(0))
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (tokens,), cluster="h100", memory_limit="8MiB")
        assert autoshard.plan_of(module).is_in_pieces
        for batch in (tokens, tokens[:1024], tokens):
            loss, expected = module(batch), alone(batch)
            loss.backward()
            expected.backward()
            for held in per_rank(loss.detach(), mesh).values():
                torch.testing.assert_close(held, expected.detach(), rtol=1e-9, atol=0)
        with torch.no_grad():
            module(tokens)
        for name, parameter in alone.named_parameters():
            gradient = module.get_parameter(name).grad
            assert gradient is not None
            for held in per_rank(gather_full_tensor(gradient), mesh).values():
                torch.testing.assert_close(held, parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_error_where_nothing_fits_is_that_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if there were room: whole logits are tried first.
    monkeypatch.setattr(ModulePlanner, "logits_room", math.inf)
    with pytest.raises(BudgetError, match="the smallest peak found") as caught:
        plan(2**20)
    assert caught.value.peak is not None
    assert caught.value.peak < LOGITS


class Wide(nn.Module):
    """Few classes behind wide layers: all logits are one piece, so that pieces hold more than whole logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16384, 16384), nn.Linear(16384, 4096)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), labels)


def test_the_error_where_nothing_fits_names_the_form_that_needs_least() -> None:
    with torch.device("meta"):
        module = Wide().bfloat16()
        inputs = torch.empty(2**16, 16384, dtype=torch.bfloat16), torch.empty(2**16, dtype=torch.int64)

    def planned(limit: int) -> ShardingPlan:
        return autoshard.plan(module, {"x": 2}, inputs, cluster="h100", memory_limit=limit)

    with pytest.raises(BudgetError, match=r"Raise memory_limit to .* or make the batch smaller") as caught:
        planned(4 * 2**30)
    assert caught.value.peak is not None
    assert not planned(caught.value.peak).is_in_pieces
    with pytest.raises(BudgetError) as below:
        planned(round(0.9 * caught.value.peak))
    assert below.value.peak == caught.value.peak
