"""`benchmarks/attention.py`: in several operators as in one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_several_operators_compute_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    attend = importlib.import_module("attention").causal_attention
    operands = [torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    one, several = (attend(*operands, fused=fused) for fused in (True, False))
    torch.testing.assert_close(several, one)
    weights = torch.randn_like(one)
    gradients = [torch.autograd.grad((out * weights).sum(), operands) for out in (one, several)]
    torch.testing.assert_close(*gradients)
