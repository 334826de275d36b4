"""Connectionist temporal classification.

ATen's operator also returns a table as wide as the longest target, which a graph of fixed shapes cannot hold. Here the
backward recomputes the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.operator_library import define, define_backward
from autoshard.patterns.ops.helpers import bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

aten = torch.ops.aten
losses = torch.ops.autoshard


def _loss(log_probs: Tensor, *options: Any) -> Tensor:
    """Return the negative log-likelihood of every sample, `[N]`, of log-probabilities `[T, N, C]`."""
    # The second result is the table.
    likelihood: Tensor = aten._ctc_loss.Tensor(log_probs, *options)[0]
    return likelihood


def _loss_backward(grad: Tensor, log_probs: Tensor, *options: Any) -> Tensor:
    """Return the gradient of the log-probabilities, `[T, N, C]`."""
    *lengths, blank, zero_infinity = options
    tables = aten._ctc_loss.Tensor(log_probs, *options)
    gradient: Tensor = aten._ctc_loss_backward.Tensor(grad, log_probs, *lengths, *tables, blank, zero_infinity)
    return gradient


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
)
define(f"ctc_loss({_ARGUMENTS}) -> Tensor", _loss, lambda log_probs, *options: log_probs.new_empty(log_probs.shape[1]))
define(
    f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor",
    _loss_backward,
    lambda grad, log_probs, *options: log_probs.new_empty(log_probs.shape),
)


def _save_ctc(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_ctc(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    options = (*ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return losses.ctc_loss_backward(grad, *options), None, None, None, None, None


define_backward("ctc_loss", _save_ctc, _differentiate_ctc)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int | str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.ctc_loss`, or `torch.ctc_loss`, whose reductions are numbers: none, mean and sum."""
    single = log_probs.dim() == 2
    lengths = [_as_tensor(value, log_probs.device).reshape(-1) for value in (input_lengths, target_lengths)]
    samples = log_probs.unsqueeze(1) if single else log_probs
    if single and targets.dim() == 1:
        targets = targets.unsqueeze(0)
    loss: Tensor = losses.ctc_loss(samples, targets, *lengths, blank, zero_infinity)
    # ATen's kernel of the loss returns infinities; as in torch, replace them here.
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction in (1, "mean"):
        return (loss / lengths[1].clamp_min(1).to(loss)).mean()
    if reduction in (2, "sum"):
        return loss.sum()
    return loss.squeeze(0) if single else loss


def _as_tensor(lengths: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """Return lengths as a tensor."""
    if isinstance(lengths, Tensor):
        return lengths
    # By operators, since `torch.tensor` would be a constant of the graph, on one device.
    if len(set(lengths)) == 1:
        return torch.full((len(lengths),), lengths[0], device=device)
    return torch.cat([torch.full((1,), length, device=device) for length in lengths])


# Samples are independent where each has a row of targets.


@rule_maker("autoshard::ctc_loss", "autoshard::ctc_loss_backward")
def ctc_loss_rule(call: OpCall) -> Rule:
    """Loss of every sample, and the gradient of the log-probabilities, linear in the incoming gradient.

    Concatenated targets are split by unknown lengths, so everything is whole.
    """
    rows = len(shape_of(call, "targets")) == 2
    items = {"log_probs": "t! n c!", "targets": "n s!" if rows else "s!", "grad": "n"}
    items |= dict.fromkeys(("input_lengths", "target_lengths"), "n")
    backward = call.is_backward
    result = items["log_probs"] if backward else "n"
    linear = [{"grad"}] if backward else []
    # A padding sample has no steps and no targets.
    return bind_named(call, items, [result], linear=linear, whole=() if rows else ("n",), fill={"n": 0.0})
