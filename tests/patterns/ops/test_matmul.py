"""Rules of matrix products against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.check import check

aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


CALLS = {
    "mm": (aten.mm.default, (_x(12, 6), _x(6, 4)), {}),
    "bmm": (aten.bmm.default, (_x(4, 12, 6), _x(4, 6, 2)), {}),
    "mv": (aten.mv.default, (_x(12, 6), _x(6)), {}),
    "dot": (aten.dot.default, (_x(12), _x(12)), {}),
    "outer": (aten.outer.default, (_x(12), _x(6)), {}),
    "addr": (aten.addr.default, (_x(6), _x(12), _x(6)), {"alpha": 2}),
    "addmm": (aten.addmm.default, (_x(4), _x(12, 6), _x(6, 4)), {}),
    "addmm scaled": (aten.addmm.default, (_x(4), _x(12, 6), _x(6, 4)), {"beta": 0.5, "alpha": 2}),
    "addmm of a matrix": (aten.addmm.default, (_x(12, 1), _x(12, 6), _x(6, 4)), {}),
    "addmm of a number": (aten.addmm.default, (_x(), _x(12, 6), _x(6, 4)), {}),
    "baddbmm": (aten.baddbmm.default, (_x(4, 1, 2), _x(4, 12, 6), _x(4, 6, 2)), {}),
    "addbmm": (aten.addbmm.default, (_x(12, 2), _x(4, 12, 6), _x(4, 6, 2)), {}),
    "addmv": (aten.addmv.default, (_x(12), _x(12, 6), _x(6)), {}),
    "linear": (aten.linear.default, (_x(2, 6, 12), _x(4, 12)), {}),
    "linear with bias": (aten.linear.default, (_x(2, 6, 12), _x(4, 12), _x(4)), {}),
    "matmul of vectors": (aten.matmul.default, (_x(12), _x(12)), {}),
    "matmul of vector and matrices": (aten.matmul.default, (_x(12), _x(4, 12, 6)), {}),
    "matmul of matrices and vector": (aten.matmul.default, (_x(4, 6, 12), _x(12)), {}),
    "matmul of batches": (aten.matmul.default, (_x(4, 1, 6, 12), _x(2, 12, 4)), {}),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert check(op, args, kwargs) == []


def test_an_infinite_bias_is_added_once() -> None:
    bias = torch.tensor([float("inf"), 1, 2, 3], dtype=torch.float64)
    # Not by parts: an infinite number is no sum of two others, so only strategies without linear sets apply.
    findings = check(aten.addmm.default, (bias, _x(12, 6), _x(6, 4)))
    assert [finding for finding in findings if "partial sum" not in finding.strategy] == []
