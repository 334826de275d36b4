from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, normal

REDUCTIONS = [0, 1, 2]


def _likelihood(shape: tuple[int, ...], ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and targets, some of which are to be ignored."""
    classes = 0 if len(shape) == 1 else 1
    samples = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(0, 6, samples, generator=torch.Generator().manual_seed(0))
    if samples:
        target.view(-1)[[0, 5]] = ignored
        target.view(-1)[1] = 2
    return torch.log_softmax(normal(*shape), classes), target


@pytest.mark.parametrize(("shape", "shards"), [((12, 6), "c n"), ((4, 6, 2, 3), "c h n w"), ((6,), "c")])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_nll_loss(shape: tuple[int, ...], shards: str, reduction: int, weighted: bool, ignored: int) -> None:
    name = "nll_loss2d" if len(shape) == 4 else "nll_loss"
    forward, backward = getattr(aten, f"{name}_forward"), getattr(aten, f"{name}_backward")
    scores, target = _likelihood(shape, ignored)
    weight = normal(6).abs() + 0.1 if weighted else None
    loss, total = forward(scores, target, weight, reduction, ignored)
    if reduction:  # without one the total weight is not written
        assert_sound(forward.default, scores, target, weight, reduction, ignored, shards=shards)
    else:
        total = scores.new_zeros(())
    gradient = normal(*loss.shape) + 2
    assert_sound(backward.default, gradient, scores, target, weight, reduction, ignored, total, shards=shards)


def test_nll_loss_where_all_samples_of_a_rank_are_ignored() -> None:
    scores, target = _likelihood((12, 6), -100)
    target[:6] = -100
    assert_sound(aten.nll_loss_forward.default, scores, target, None, 1, -100)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("name", "extra"), [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,)), ("soft_margin_loss", ())]
)
def test_elementwise_loss(name: str, extra: tuple[float, ...], reduction: int) -> None:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    x, target = normal(4, 6), normal(6, 4).T.sign()
    assert_sound(forward.default, x, target, reduction, *extra, shards="dim0 dim1")
    gradient = normal(*forward(x, target, reduction, *extra).shape) + 2
    assert_sound(backward.default, gradient, x, target, reduction, *extra)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [True, False])
def test_binary_cross_entropy(reduction: int, weighted: bool) -> None:
    x, target = normal(4, 6).sigmoid(), (normal(4, 6) + 1).sigmoid()
    weight = normal(4, 6).abs() if weighted else None
    loss = aten.binary_cross_entropy(x, target, weight, reduction)
    assert_sound(aten.binary_cross_entropy.default, x, target, weight, reduction)
    assert_sound(aten.binary_cross_entropy_backward.default, normal(*loss.shape) + 2, x, target, weight, reduction)


def test_no_rule_for_operands_that_are_broadcast() -> None:
    x, target = normal(4, 6), normal(1, 6)
    op = aten.mse_loss.default
    assert rule_for(call_of(op, (x, target), {}, op(x, target))) is None


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weight", [None, (4, 6), (6,)])
@pytest.mark.parametrize("positive", [None, (6,)])
def test_binary_cross_entropy_with_logits(reduction: int, weight: Any, positive: Any) -> None:
    weights = [None if shape is None else normal(*shape).abs() for shape in (weight, positive)]
    args = (normal(4, 6), normal(4, 6).sigmoid(), *weights, reduction)
    assert_sound(aten.binary_cross_entropy_with_logits.default, *args, shards="dim0 dim1")
