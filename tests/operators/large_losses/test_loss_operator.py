"""Losses of logits in pieces, against torch's losses of whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from autoshard.operator_library import WORKSPACES
from autoshard.operators.large_losses import loss_operator
from autoshard.operators.large_losses.loss_operator import (
    cross_entropy_of_statistics,
    logsumexp_of_statistics,
    operators,
    statistics_of_logits,
)
from tests.memory_tracker import Tracker

REDUCTIONS = ("none", "mean", "sum")


def whole_losses(operands: dict[str, Any], options: dict[str, Any], scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """The loss and logsumexp of whole logits, by torch."""
    logits = functional.linear(operands["hidden"], operands["weight"], operands["bias"]) * scale
    logits = cap * logits.tanh() if cap else logits
    moved = logits.movedim(-1, 1) if logits.dim() > 2 else logits
    loss = functional.cross_entropy(moved, operands["target"], operands["class_weights"], **options)
    return loss, logits.logsumexp(-1)


def piecewise_losses(
    operands: dict[str, Any], options: dict[str, Any], scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """The same by the operators."""
    hidden, weight, bias = operands["hidden"], operands["weight"], operands["bias"]
    target, class_weights = operands["target"], operands["class_weights"]
    expectation = {name: options[name] for name in ("ignore_index", "label_smoothing")}
    logsumexp, expected = statistics_of_logits(
        hidden, weight, bias, target, class_weights, **expectation, scale=scale, cap=cap, dtype=hidden.dtype
    )
    reduction = REDUCTIONS.index(options["reduction"])
    loss = cross_entropy_of_statistics(
        logsumexp, expected, target, class_weights, reduction, **expectation, classes=len(weight), dtype=hidden.dtype
    )
    return loss, logsumexp_of_statistics(logsumexp, False, dtype=hidden.dtype)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.sampled_from([(7,), (2, 5), (13,), (2, 3, 2)]),
    classes=st.sampled_from([5, 11]),
    step=st.integers(1, 12),
    width=st.sampled_from([1, 4]),
    reduction=st.sampled_from(REDUCTIONS),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    ignore_index=st.sampled_from([-100, 2]),
    has_bias=st.booleans(),
    is_weighted=st.booleans(),
    cap=st.sampled_from([0.0, 2.0]),
    scale=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 100),
)
def test_loss_and_gradients_are_those_of_whole_logits(
    rows: tuple[int, ...],
    classes: int,
    step: int,
    width: int,
    reduction: str,
    label_smoothing: float,
    ignore_index: int,
    has_bias: bool,
    is_weighted: bool,
    cap: float,
    scale: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    target = torch.randint(classes, rows, generator=generator)
    target.view(-1)[0] = ignore_index
    operands = {
        "hidden": 3 * normal(*rows, width),
        "weight": normal(classes, width),
        "bias": normal(classes) if has_bias else None,
        "target": target,
        "class_weights": normal(classes).abs() if is_weighted else None,
    }
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    trained = [operands[name].requires_grad_() for name in ("hidden", "weight", "bias") if operands[name] is not None]
    factor = normal(*rows) if reduction == "none" else normal()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_operator, "LEAST_STEP", step)
        for losses in (whole_losses, piecewise_losses):
            loss, logsumexp = losses(operands, options, scale, cap)
            # With a penalty of the logsumexp (z-loss).
            gradients = torch.autograd.grad((loss * factor).sum() + logsumexp.square().sum(), trained)
            results.append((loss, logsumexp, *gradients))
    for piecewise, whole in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(piecewise, whole, rtol=1e-9, atol=1e-11)


def test_classes_may_be_ruled_out_by_their_bias() -> None:
    operands: dict[str, Any] = {
        "hidden": torch.randn(6, 3, dtype=torch.float64, requires_grad=True),
        "weight": torch.randn(8, 3, dtype=torch.float64),
        "bias": torch.zeros(8, dtype=torch.float64),
        "target": torch.arange(6) % 4,
        "class_weights": None,
    }
    operands["bias"][4:] = -torch.inf
    options = {"reduction": "mean", "label_smoothing": 0.0, "ignore_index": -100}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_operator, "LEAST_STEP", 2)
        pieces = [losses(operands, options, 1.0, 0.0)[0] for losses in (whole_losses, piecewise_losses)]
        gradients = [torch.autograd.grad(loss, operands["hidden"])[0] for loss in pieces]
    torch.testing.assert_close(*pieces, rtol=1e-9, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(40, 300), (300, 40)])
def test_sums_of_pieces_are_not_rounded_to_half_precision(shape: tuple[int, int]) -> None:
    rows, classes = shape
    hidden = torch.randn(rows, 7).bfloat16().requires_grad_()
    weight = torch.randn(classes, 7).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows,))
    logits = functional.linear(hidden.double(), weight.double())
    exact = torch.autograd.grad(functional.cross_entropy(logits, target, reduction="sum"), [hidden, weight])
    # The same casts as a model makes: products in half precision, and the rest in single precision.
    logits = functional.linear(hidden, weight).float()
    usual = torch.autograd.grad(functional.cross_entropy(logits, target, reduction="sum"), [hidden, weight])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_operator, "LEAST_STEP", 7)
        statistics = statistics_of_logits(hidden, weight, None, target, None, dtype=torch.bfloat16)
        loss = cross_entropy_of_statistics(*statistics, target, reduction=2, classes=len(weight), dtype=torch.float32)
        pieces = torch.autograd.grad(loss, [hidden, weight])
    for piecewise, whole, true in zip(pieces, usual, exact, strict=True):
        assert (piecewise - true).abs().mean() <= 1.3 * (whole - true).abs().mean()


def test_only_gradients_that_are_needed_are_computed() -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3, requires_grad=True)
    target = torch.arange(4)
    statistics = statistics_of_logits(hidden, weight, None, target, None, dtype=torch.float32)
    loss = cross_entropy_of_statistics(*statistics, target, classes=5, dtype=torch.float32)
    loss.backward()
    expected = torch.autograd.grad(functional.cross_entropy(hidden @ weight.t(), target), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("wrong", [-1, 5, 7])
def test_a_target_that_is_no_class_is_seen(wrong: int) -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    target = torch.tensor([0, wrong, -100, 4])
    statistics = statistics_of_logits(hidden, weight, None, target, None, dtype=torch.float32)
    losses = cross_entropy_of_statistics(*statistics, target, reduction=0, classes=5, dtype=torch.float32)
    assert losses.isnan().tolist() == [False, True, False, False]
    assert losses[2] == 0


def test_pieces_bound_the_workspace() -> None:
    with torch.device("meta"):
        hidden, weight = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(128256, 4096, dtype=torch.bfloat16)
        target = torch.empty(8192, dtype=torch.long)
    held = WORKSPACES[operators.logit_statistics.default](hidden, weight, None, target, None, 1.0, 0.0, 1.0, 0.0)
    assert held == 4096 * 8192 * (2 + 2 * 4)


@pytest.mark.parametrize(("rows", "classes"), [(512, 8192), (8192, 512), (300, 300)])
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspace_is_what_the_programs_hold(
    rows: int, classes: int, cap: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 512)
    hidden, weight = torch.randn(rows, 16, dtype=dtype), torch.randn(classes, 16, dtype=dtype)
    target, options = torch.randint(classes, (rows,)), (1.0, cap, 1.0, 0.01)
    forward = (hidden, weight, None, target, None, *options)
    statistics = operators.logit_statistics(*forward)
    backward = (*statistics, hidden, weight, None, target, None, statistics[0], *options, [True, True, False])
    # An operator hides what its program calls: the programs themselves are watched.
    programs: list[tuple[Callable[..., Any], Any, tuple[Any, ...]]] = [
        (loss_operator.statistics, operators.logit_statistics.default, forward),
        (loss_operator.gradients_of_logits, operators.logit_statistics_backward.default, backward),
    ]
    for program, op, arguments in programs:
        tracker = Tracker()
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        tracker.track(tensors, "operands")
        before = tracker.held
        with tracker:
            results = program(*arguments)
        held = tracker.peak.bytes - before - sum(result.nbytes for result in results)
        said = WORKSPACES[op](*arguments)
        # Besides, a few numbers for every row and class.
        assert 0.85 * said <= held <= said + 100 * (rows + classes)
