"""Calls of the attention of captured graphs, forward and backward, as tests of its rules make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from autoshard.operators.attention.attention_operator import operators

FORWARD = operators.attention.default
BACKWARD = operators.attention_backward.default


def forward_args(
    tensors: Sequence[Tensor], causal: bool = False, mask: Tensor | None = None, window: int = 0, scale: float = 0.4
) -> tuple[Any, ...]:
    """Arguments of the forward operator; `tensors` are query, key and value."""
    return (*tensors, mask, None, causal, window, scale)


def backward_args(
    gradient: Tensor, tensors: Sequence[Tensor], *options: Any, mask_gradient: bool = False, **keywords: Any
) -> tuple[Any, ...]:
    """Arguments of the backward operator, with what the forward one gives; the options are those of `forward_args`."""
    args = forward_args(tensors, *options, **keywords)
    return (gradient, *tensors, *FORWARD(*args)[:2], *args[3:], mask_gradient)
