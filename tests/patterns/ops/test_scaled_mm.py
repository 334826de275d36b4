"""Products in eight bits, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal


def _eight_bits(*shape: int) -> torch.Tensor:
    return normal(*shape).to(torch.float8_e4m3fn)


ONE = torch.tensor(0.5)
SCALED = (_eight_bits(48, 64), _eight_bits(48, 64).t())


@pytest.mark.parametrize(
    "rest",
    [
        (ONE, ONE),
        (ONE, ONE, normal(48).bfloat16()),
        (ONE.expand(1, 1), ONE.expand(1, 1)),
        (normal(48, 1).abs().float(), normal(1, 48).abs().float()),
    ],
    ids=["one scale", "bias", "one scale as a matrix", "scales of rows and columns"],
)
def test_products_in_eight_bits(rest: tuple[torch.Tensor, ...]) -> None:
    assert_sound(aten._scaled_mm.default, *SCALED, *rest, out_dtype=torch.bfloat16, shards="i k j")


def test_a_result_of_eight_bits_is_no_partial_sum() -> None:
    _, rule = bound(aten._scaled_mm.default, *SCALED, ONE, ONE, None, ONE, out_dtype=torch.float8_e4m3fn)
    assert {factor.name for factor in rule.factors if factor.shardable} == {"i", "j"}


def _second_version(*scales: torch.Tensor, bias: torch.Tensor | None = None, way: int = 0) -> tuple[Any, ...]:
    """Arguments of `_scaled_mm_v2`: scales in lists, each with how it is meant and how it lies in memory."""
    first, second = scales
    return (*SCALED, [first], [way], [0], [second], [way], [0], bias, torch.bfloat16)


@pytest.mark.parametrize(
    "args",
    [
        _second_version(ONE, ONE),
        _second_version(ONE, ONE, bias=normal(48).bfloat16()),
        _second_version(normal(48, 1).abs().float(), normal(1, 48).abs().float(), way=1),
    ],
    ids=["one scale", "bias", "scales of rows and columns"],
)
def test_products_with_scales_in_lists(args: tuple[Any, ...]) -> None:
    assert_sound(aten._scaled_mm_v2.default, *args, shards="i k j")


def test_scales_of_blocks_are_left_whole() -> None:
    args = _second_version(torch.ones(48, 4), torch.ones(48, 4), way=2)
    result = torch.empty(48, 48, dtype=torch.bfloat16)
    assert rule_for(call_of(aten._scaled_mm_v2.default, args, {}, result)) is None
