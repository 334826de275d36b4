"""Rules of matrix products against the operators themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

LEFT, RIGHT = normal(12, 6), normal(6, 4)
LEFTS, RIGHTS = normal(4, 12, 6), normal(4, 6, 2)

CASES = {
    "mm": partial(assert_sound, aten.mm.default, LEFT, RIGHT, shards="i k j"),
    "bmm": partial(assert_sound, aten.bmm.default, LEFTS, RIGHTS, shards="b i k j"),
    "mv": partial(assert_sound, aten.mv.default, LEFT, normal(6), shards="i k"),
    "dot": partial(assert_sound, aten.dot.default, normal(12), normal(12), shards="k"),
    "outer": partial(assert_sound, aten.outer.default, normal(12), normal(6), shards="i j"),
    "addr": partial(assert_sound, aten.addr.default, normal(6), normal(12), normal(6), alpha=2, shards="i j"),
    "addmm": partial(assert_sound, aten.addmm.default, normal(4), LEFT, RIGHT, shards="i k j"),
    "addmm scaled": partial(assert_sound, aten.addmm.default, normal(4), LEFT, RIGHT, beta=0.5, alpha=2),
    "addmm of a matrix": partial(assert_sound, aten.addmm.default, normal(12, 1), LEFT, RIGHT, shards="i k j"),
    "addmm of a number": partial(assert_sound, aten.addmm.default, normal(), LEFT, RIGHT, shards="i k j"),
    "baddbmm": partial(assert_sound, aten.baddbmm.default, normal(4, 1, 2), LEFTS, RIGHTS, shards="b i k j"),
    "addbmm": partial(assert_sound, aten.addbmm.default, normal(12, 2), LEFTS, RIGHTS, shards="b i k j"),
    "addmv": partial(assert_sound, aten.addmv.default, normal(12), LEFT, normal(6), shards="i k"),
    "linear": partial(assert_sound, aten.linear.default, normal(2, 6, 12), normal(4, 12), shards="dim0 dim1 k j"),
    "linear with bias": partial(
        assert_sound, aten.linear.default, normal(2, 6, 12), normal(4, 12), normal(4), shards="dim0 dim1 k j"
    ),
    "matmul of vectors": partial(assert_sound, aten.matmul.default, normal(12), normal(12), shards="k"),
    "matmul of vector and matrices": partial(
        assert_sound, aten.matmul.default, normal(12), normal(4, 12, 6), shards="dim0 k j"
    ),
    "matmul of matrices and vector": partial(
        assert_sound, aten.matmul.default, normal(4, 6, 12), normal(12), shards="dim0 i k"
    ),
    "matmul of batches": partial(
        assert_sound, aten.matmul.default, normal(4, 1, 6, 12), normal(2, 12, 4), shards="dim0 dim1 i k j"
    ),
    "_addmm_activation": partial(assert_sound, aten._addmm_activation.default, normal(4), LEFT, RIGHT, shards="i j"),
    "_addmm_activation of a matrix": partial(
        assert_sound, aten._addmm_activation.default, normal(12, 4), LEFT, RIGHT, use_gelu=True, shards="i j"
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_an_infinite_bias_is_added_once() -> None:
    bias = torch.tensor([float("inf"), 1, 2, 3], dtype=torch.float64)
    # Not by parts: an infinite number is no sum of two others, so only strategies without linear sets apply.
    findings = check(aten.addmm.default, (bias, normal(12, 6), normal(6, 4)))
    assert [finding for finding in findings if "partial sum" not in finding.strategy] == []


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-9, 9, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


def test_products_of_integers_are_split_in_units_of_eight() -> None:
    assert_sound(aten._int_mm.default, _integers(24, 32), _integers(32, 16), shards="i k j")
    _, rule = bound(aten._int_mm.default, _integers(24, 32), _integers(32, 16))
    assert {factor.name: factor.size for factor in rule.factors if factor.shardable} == {"i": 24, "k": 4, "j": 2}
    assert_sound(aten._int_mm.default, _integers(24, 12), _integers(12, 16), shards="i j")


def test_weights_of_eight_bits() -> None:
    scales = torch.rand(48, generator=torch.Generator().manual_seed(0)).bfloat16()
    args = (normal(24, 64).bfloat16(), _integers(48, 64), scales)
    assert_sound(aten._weight_int8pack_mm.default, *args, shards="i j k")


# Products in eight bits, against torch.


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


def test_every_dim_is_a_loop() -> None:
    """As `torch.nn.Bilinear` calls it: samples, outputs, and the features of both inputs."""
    left, weight, right = normal(4, 6), normal(8, 6, 12), normal(4, 12)
    assert_sound(aten._trilinear.default, left, weight, right, [1, 3], [0], [1, 2], [2, 3], shards="d0 d1 d2 d3")
