from __future__ import annotations

import pytest
import torch

from tests.patterns.ops.soundness import assert_sound, aten, normal

REDUCTIONS = [0, 1, 2]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("power", "weighted"), [(1, False), (2, True)])
def test_multi_margin_loss(reduction: int, power: int, weighted: bool) -> None:
    scores, target = normal(12, 5), torch.arange(12) % 5
    options = (power, 0.7, normal(5).abs() if weighted else None, reduction)
    assert_sound(aten.multi_margin_loss.default, scores, target, *options, shards="n")
    gradient = normal(*aten.multi_margin_loss(scores, target, *options).shape) + 2
    assert_sound(aten.multi_margin_loss_backward.default, gradient, scores, target, *options, shards="n")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction: int) -> None:
    scores, target = normal(12, 5), torch.tensor([[1, 3, -1, 0, 0], [2, -1, 0, 0, 0], [0, 1, 2, 3, 4]]).repeat(4, 1)
    loss, is_target = aten.multilabel_margin_loss_forward(scores, target, reduction)
    assert_sound(aten.multilabel_margin_loss_forward.default, scores, target, reduction, shards="n")
    gradient = normal(*loss.shape) + 2
    backward = aten.multilabel_margin_loss_backward.default
    assert_sound(backward, gradient, scores, target, reduction, is_target, shards="n")


def test_a_single_sample_is_whole() -> None:
    assert_sound(aten.multi_margin_loss.default, normal(5), torch.tensor(2), 1, 1, None, 1, shards="")
