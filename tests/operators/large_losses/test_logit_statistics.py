"""Rules of statistics of logits and their gradients, against the operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.operators.large_losses import loss_operator
from autoshard.operators.large_losses.loss_operator import operators
from tests.patterns.ops.soundness import assert_sound, bound, normal


def _operands(rows: tuple[int, ...], classes: int, bias: bool, weighted: bool) -> tuple[Any, ...]:
    """Operands of the operator up to the weights of classes; one row has no target."""
    target = torch.randint(classes, rows, generator=torch.Generator().manual_seed(0))
    target.view(-1)[1] = -1
    class_weights = normal(classes).abs() if weighted else None
    return normal(*rows, 6), normal(classes, 6) - 3, normal(classes) if bias else None, target, class_weights


@pytest.mark.parametrize(("rows", "shards"), [((12,), "dim0 v"), ((4, 6), "dim0 dim1 v")])
@pytest.mark.parametrize("classes", [12, 10])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_statistics_and_gradients(
    rows: tuple[int, ...],
    shards: str,
    classes: int,
    bias: bool,
    weighted: bool,
    cap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 4)
    operands, options = _operands(rows, classes, bias, weighted), (0.7, cap, 0.9, 0.1 / classes)
    assert_sound(operators.logit_statistics.default, *operands, *options, shards=shards)
    logsumexp, expected = operators.logit_statistics(*operands, *options)
    gradients = normal(*logsumexp.shape) + 1, normal(*expected.shape) - 1
    backward = operators.logit_statistics_backward.default
    mask = [True, True, bias]
    assert_sound(backward, *gradients, *operands, logsumexp, *options, mask, shards=shards)


def test_gradients_that_are_not_asked_for() -> None:
    operands, options = _operands((12,), 12, True, False), (1.0, 0.0, 1.0, 0.0)
    logsumexp, _ = operators.logit_statistics(*operands, *options)
    for mask in ([True, False, False], [False, True, True]):
        backward = operators.logit_statistics_backward.default
        assert_sound(backward, normal(12), normal(12) + 1, *operands, logsumexp, *options, mask, shards="dim0 v")


def test_exchange_is_two_numbers_per_row() -> None:
    _, rule = bound(operators.logit_statistics.default, *_operands((12,), 10, False, False), 1.0, 0.0, 1.0, 0.0)
    assert rule.factors[rule.indices("v")[0]].exchanges == (("all_reduce", 8 * 12),) * 2
