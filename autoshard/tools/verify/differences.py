"""Relative differences of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# A gradient that is exactly zero in theory is rounding on both sides.
_FLOOR = 1e-3


def difference_scales(references: Mapping[str, Tensor]) -> dict[str, float]:
    """Return, by name, the number that differences to a reference are measured relative to.

    It is the largest finite magnitude in the reference, but no less than a thousandth of the largest one in all of
    them.
    """
    largest = {name: _largest(tensor) for name, tensor in references.items()}
    floor = _FLOOR * max(largest.values(), default=0.0)
    return {name: max(value, floor) for name, value in largest.items()}


def relative_difference(pairs: Iterable[tuple[Tensor, Tensor]], scale: float) -> float:
    """Return the largest difference between the tensors of a pair, relative to `scale`; absolute if that is zero.

    Returns:
        Infinity if there is no pair, shapes differ, a number is NaN, or one of two different numbers is infinite.
    """
    worst = max((_difference(*pair) for pair in pairs), default=math.inf)
    return worst / scale if scale else worst


def _largest(tensor: Tensor) -> float:
    magnitudes = torch.nan_to_num(_wide(tensor).abs(), nan=0.0, posinf=0.0)
    return magnitudes.max().item() if magnitudes.numel() else 0.0


def _difference(tensor: Tensor, reference: Tensor) -> float:
    if tensor.shape != reference.shape:
        return math.inf
    if not tensor.numel():
        return 0.0
    ours, theirs = _wide(tensor), _wide(reference)
    distances = torch.where(ours == theirs, 0.0, (ours - theirs).abs())
    return torch.nan_to_num(distances, nan=math.inf, posinf=math.inf).max().item()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
