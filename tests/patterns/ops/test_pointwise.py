"""Rules of pointwise operators against the operators themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.soundness import check

aten = torch.ops.aten

X = torch.randn(4, 6, dtype=torch.float64)
Y = torch.randn(4, 6, dtype=torch.float64)
ROW = torch.randn(6, dtype=torch.float64)
COLUMN = torch.randn(4, 1, dtype=torch.float64)
NUMBER = torch.randn((), dtype=torch.float64)
MASK = X > 0

LINEAR: dict[str, tuple[Any, tuple[Any, ...], list[set[int]]]] = {
    "add": (aten.add.Tensor, (X, ROW), [{0, 1}]),
    "add of a number": (aten.add.Tensor, (X, 2.0), []),
    "add.Scalar": (aten.add.Scalar, (X, 2.0), []),
    "sub": (aten.sub.Tensor, (X, COLUMN), [{0, 1}]),
    "rsub": (aten.rsub.Scalar, (X, 1), []),
    "mul": (aten.mul.Tensor, (X, NUMBER), [{0}, {1}]),
    "mul by a number": (aten.mul.Tensor, (X, 3.0), [{0}]),
    "mul of booleans": (aten.mul.Tensor, (MASK, MASK), []),
    "div": (aten.div.Tensor, (X, Y), [{0}]),
    "div by a number": (aten.div.Tensor, (X, 7), [{0}]),
    "neg": (aten.neg.default, (X,), [{0}]),
    "exp": (aten.exp.default, (X,), []),
    "where": (aten.where.self, (MASK, X, COLUMN), [{1, 2}]),
    "where zero": (aten.where.ScalarSelf, (MASK, 0, X), [{1}]),
    "where one": (aten.where.ScalarOther, (MASK, X, 1), []),
    "masked_fill by zero": (aten.masked_fill.Scalar, (X, MASK, 0.0), [{0}]),
    "masked_fill by infinity": (aten.masked_fill.Scalar, (X, MASK, -torch.inf), []),
    "masked_fill by a tensor": (aten.masked_fill.Tensor, (X, MASK, NUMBER), [{0, 2}]),
    "lerp": (aten.lerp.Scalar, (X, Y, 0.3), [{0, 1}]),
    "lerp by a tensor": (aten.lerp.Tensor, (X, Y, ROW), [{0, 1}]),
    "addcmul": (aten.addcmul.default, (X, Y, ROW), [{0, 1}, {0, 2}]),
    "addcdiv": (aten.addcdiv.default, (X, Y, ROW), [{0, 1}]),
    "copy": (aten.copy.default, (X, ROW), [{1}]),
    "gelu": (aten.gelu.default, (X,), []),
    "gelu_backward": (aten.gelu_backward.default, (Y, X), [{0}]),
    "silu_backward": (aten.silu_backward.default, (Y, X), [{0}]),
    "tanh_backward": (aten.tanh_backward.default, (Y, X.tanh()), [{0}]),
    "sigmoid_backward": (aten.sigmoid_backward.default, (Y, X.sigmoid()), [{0}]),
    "threshold_backward": (aten.threshold_backward.default, (Y, X, 0), [{0}]),
    "leaky_relu_backward": (aten.leaky_relu_backward.default, (Y, X, 0.1, False), [{0}]),
    "elu_backward": (aten.elu_backward.default, (Y, 1.0, 1, 1, False, X), [{0}]),
    "hardswish_backward": (aten.hardswish_backward.default, (Y, X), [{0}]),
    "softplus_backward": (aten.softplus_backward.default, (Y, X, 1, 20), [{0}]),
    "pow": (aten.pow.Tensor_Scalar, (X, 2), []),
    "pow of tensors": (aten.pow.Tensor_Tensor, (X.abs(), ROW), []),
    "clamp": (aten.clamp.default, (X, -1, 1), []),
    "maximum": (aten.maximum.default, (X, Y), []),
    "gt": (aten.gt.Tensor, (X, ROW), []),
    "le.Scalar": (aten.le.Scalar, (X, 0), []),
    "bitwise_and": (aten.bitwise_and.Tensor, (MASK, MASK), []),
    "logical_not": (aten.logical_not.default, (MASK,), []),
    "glu": (aten.glu.default, (X, 1), []),
    "glu_backward": (aten.glu_backward.default, (Y, torch.cat([X, Y], 1), 1), [{0}]),
}


@pytest.mark.parametrize(("op", "args", "linear"), LINEAR.values(), ids=LINEAR)
def test_rule_is_sound_and_linear_where_it_should_be(op: Any, args: tuple[Any, ...], linear: list[set[int]]) -> None:
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    assert [set(operands) for operands in rule.linear] == linear
    assert check(op, args) == []


def test_division_with_rounding_is_not_linear() -> None:
    call = call_of(aten.div.Tensor_mode, (X, Y), {"rounding_mode": "floor"}, X)
    rule = rule_for(call)
    assert rule is not None
    assert rule.linear == ()
    assert check(aten.div.Tensor_mode, (X, Y), {"rounding_mode": "floor"}) == []


UNARY = """
    abs acos acosh angle asin asinh atan atanh ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp2 expm1 floor
    frac hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan leaky_relu lgamma log log10 log1p log2 logit
    log_sigmoid_forward mish nan_to_num rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin sinc
    sinh softplus softshrink sqrt square tan tanh trunc
"""


@pytest.mark.parametrize("name", UNARY.split())
def test_unary_operators_keep_dims(name: str) -> None:
    packet = getattr(aten, name)
    assert check(packet.default, (X,), sizes=(2,)) == []
