from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

SHAPES = [(12, 6, 4, 2), (12, 6)]


def _channels() -> list[torch.Tensor]:
    return [normal(6), normal(6) + 1, normal(6) - 1, normal(6).abs() + 0.5]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_functional(shape: tuple[int, ...], training: bool) -> None:
    x = 2 * normal(*shape) + 1
    op = aten._native_batch_norm_legit_functional.default
    assert_sound(op, x, *_channels(), training, 0.1, 1e-5)
    assert_sound(op, x, None, None, *_channels()[2:], training, 0.3, 1e-5)


def test_training_shards_batch_channels_and_positions() -> None:
    args = (normal(12, 6, 4, 2), *_channels(), True, 0.1, 1e-5)
    assert_sound(aten._native_batch_norm_legit_functional.default, *args, shards="n c s0 s1")


def test_other_spellings() -> None:
    x = 2 * normal(12, 6, 4) + 1
    assert_sound(aten._native_batch_norm_legit.no_stats, x, *_channels()[:2], True, 0.1, 1e-5)
    assert_sound(aten._native_batch_norm_legit_no_training.default, x, *_channels(), 0.1, 1e-5)
    assert_sound(aten._batch_norm_with_update_functional.default, x, *_channels(), 0.1, 1e-5)
    assert_sound(aten._batch_norm_no_update.default, x, *_channels(), 0.1, 1e-5)


def test_single_precision_input_with_wide_statistics() -> None:
    x = (normal(12, 6, 4) + 1).bfloat16()
    assert_sound(
        aten._native_batch_norm_legit_functional.default, x, *(t.bfloat16() for t in _channels()), True, 0.1, 1e-5
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [True, False, False]])
def test_backward_in_training(shape: tuple[int, ...], mask: list[bool]) -> None:
    x, gradient = 2 * normal(*shape) + 1, normal(*shape) + 1
    weight, _, mean, variance = _channels()
    saved = aten._native_batch_norm_legit_functional(x, *_channels(), True, 0.1, 1e-5)[1:3]
    args = (gradient, x, weight, mean, variance, *saved, True, 1e-5, mask)
    assert_sound(aten.native_batch_norm_backward.default, *args)
    reserve = torch.empty(0, dtype=torch.uint8)
    assert_sound(aten.batch_norm_backward.default, *args, reserve)


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_in_inference(shape: tuple[int, ...]) -> None:
    weight, _, mean, variance = _channels()
    empty = normal(0)
    args = (normal(*shape), normal(*shape), weight, mean, variance, empty, empty, False, 1e-5, [True, True, True])
    assert_sound(aten.native_batch_norm_backward.default, *args)


def test_exchange_is_priced_in_training_only() -> None:
    op, x = aten._native_batch_norm_legit_functional.default, normal(12, 6, 4)
    for training, expected in ((True, (("gather_of_each", 3 * 8 * 6),)), (False, ())):
        _, rule = bound(op, x, *_channels(), training, 0.1, 1e-5)
        assert rule.factors[rule.indices("n")[0]].exchanges == expected
