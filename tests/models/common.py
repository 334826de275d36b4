"""What the models share: sizes, seeds, tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

BATCH = 12
SEQUENCE = 12
VOCABULARY = 48
HIDDEN = 48
SMALL = 24  # the hidden size of models of which there are many

Model = tuple[nn.Module, dict[str, Any]]


@contextlib.contextmanager
def fixed_seed(dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Build under `dtype` as default and with a fixed seed, leaving the global random state as it was."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def tokens(batch: int = BATCH, sequence: int = SEQUENCE) -> torch.Tensor:
    """Random token numbers of shape [batch, sequence]."""
    return torch.randint(0, VOCABULARY, (batch, sequence))
