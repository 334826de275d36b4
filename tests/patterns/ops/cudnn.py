"""cuDNN's attention written out for the CPU, to check what rules do with a kernel that this machine does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@contextlib.contextmanager
def cudnn_on_cpu() -> Iterator[None]:
    """While it lasts, the kernel runs on the CPU: without dropout, and at the scale it has by default."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
        library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
        yield


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """The mask as the kernel takes it: added to the scores."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
    return scores if bias is None else scores + bias


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, _: bool, dropout: float = 0.0, causal: bool = False
) -> tuple[Any, ...]:
    """The result, and the logarithms of the sums of exponentials `[b, h, s, 1]`; what else it keeps means nothing."""
    scores = _scores(query, key, bias, causal)
    empty = torch.zeros((), dtype=torch.int64)
    kept = (empty, empty, query.shape[2], key.shape[2], empty, empty, empty)
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True), *kept


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Tensor, logarithm: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """From the statistics that it is given, as the kernel does, which may be those of more keys."""
    bias, causal = rest[2], rest[8]
    weights = (_scores(query, key, bias, causal) - logarithm).exp()
    inner = (gradient * result).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.transpose(-2, -1) - inner) / query.shape[-1] ** 0.5
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, weights.transpose(-2, -1) @ gradient
