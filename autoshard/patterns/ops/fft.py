"""Fourier transforms: every dim that is not transformed is independent."""

from __future__ import annotations

from autoshard.patterns.notation import bind
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def fourier(call: OpCall) -> Rule:
    """Complex to complex, real to complex and back; the last transformed dim of the latter two changes its size."""
    rank = len(call.operands[0].shape)
    transformed = {dim % rank for dim in call.arg("dim")}
    source = [f"p{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    result = [f"q{dim}!" if dim in transformed else f"d{dim}" for dim in range(rank)]
    return bind(f"{' '.join(source)} -> {' '.join(result)}", call, linear="0")
