"""Modules and inputs in double precision."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.tools.verify.float64 import Float64Mode, widen, widen_module, widen_tensors


def test_a_module_gets_float64_in_place() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).bfloat16()
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64), requires_grad=False)
    module[1].weight = module[0].bias  # tied
    widen_module(module)
    assert module[0].weight.dtype == module[1].running_mean.dtype == torch.float64
    assert module.phase.dtype == torch.complex128
    assert not module.phase.requires_grad
    assert module[1].weight is module[0].bias
    assert module[1].num_batches_tracked.dtype == torch.int64


def test_inputs_are_copies() -> None:
    x, mask = torch.randn(2, requires_grad=True), torch.ones(2, dtype=torch.bool)
    batch = widen_tensors(({"x": x}, [mask, 3]))
    assert batch[0]["x"].dtype == torch.float64
    assert batch[0]["x"].requires_grad
    assert batch[1][1] == 3
    batch[1][0][0] = False
    assert mask.all()
    assert widen(x.detach()).requires_grad is False


def test_requests_for_float32_are_for_float64() -> None:
    with Float64Mode():
        assert torch.ones(2).float().dtype == torch.ones(2, dtype=torch.float32).dtype == torch.float64
    assert torch.ones(2).dtype == torch.float32
