"""Parameters and activations that `forward` changes in place, unseen by autograd: the numbers of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.specs.axes import MeshShape
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, held_by_ranks, train


class Layers(nn.Module):
    """Layers whose parameters are changed before they are used, or between two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("scale", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        clamped, row, halved, twice, filled = (layer.weight for layer in self.layers)
        before = self.layers[1].bias[:4].sum()
        clamped.data.clamp_(-0.1, 0.1)
        row[1:5].data.zero_()
        with torch.no_grad():
            halved.mul_(0.5)
            self.layers[2].bias[2:4].zero_()
        self.layers[1].bias.data.add_(0.25)
        twice.detach().mul_(0.5)
        twice.data.t()[3].copy_(self.layers[0].bias.data)
        filled.data.fill_(0.125)
        self.scale.data.clamp_(-0.5, 0.5)
        for layer in self.layers:
            x = x + layer(x).sin()
        if not torch.is_grad_enabled():
            return filled
        return (self.tied(x) * self.scale + before).square().mean()


def test_changes_are_those_of_one_device() -> None:
    model = Layers().double()
    inputs = {"x": torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)}
    expected = train(copy.deepcopy(model), inputs)
    mesh = MeshShape.of({"dp": 2, "tp": 2})
    plan = random_plan(capture(model, (), inputs), mesh, 1)
    with simulated_mesh(dp=2, tp=2) as device_mesh:
        autoshard.parallelize(model, device_mesh, (), inputs, plan=plan)
        assert compare(train(model, inputs), expected).worst < TOLERANCE
        with torch.no_grad():
            assert all(whole.eq(0.125).all() for whole in held_by_ranks(model(**inputs)))


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        (x if x.requires_grad else self.weight).data.clamp_(-1, 1)
        return super().forward(x).sum()


X = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("x", "keywords", "told"),
    [
        (
            X.clone().requires_grad_(),
            {},
            r"changes the numbers of a tensor that has a gradient, .*Compute a new tensor",
        ),
        (X, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, "changes the parameter weight.*mixed precision"),
        (X, {"pipeline": autoshard.Pipeline(axis="pp", microbatches=2)}, "the parameter weight.*the microbatches"),
    ],
)
def test_changes_that_no_program_has_are_refused(x: Tensor, keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(CaptureError, match=told) as caught:
        autoshard.plan(Clamped(2, 2), {"pp": 2}, (x,), cluster="cpu", **keywords)
    assert "data.clamp_" in str(caught.value)


def test_an_input_that_is_changed_without_gradients_is_refused() -> None:
    class Zeroed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x[0].zero_()
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"changes the input x in place, .*x\[0\]\.zero_\(\)"):
        capture(Zeroed(2, 2), (X.clone().requires_grad_(),), {})
