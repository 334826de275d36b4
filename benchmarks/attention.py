"""Causal attention of the benchmarks' models: in one operator, or in several, as before there was one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, fused: bool) -> Tensor:
    """Attention of `[batch, heads, tokens, width]` to earlier tokens; unfused, all scores are held at once."""
    if fused:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    tokens = query.shape[-2]
    scores = query / math.sqrt(query.shape[-1]) @ key.transpose(-2, -1)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ value
