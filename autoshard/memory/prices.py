"""The moments of a step at which most is held, and what memory is to cost there."""

from __future__ import annotations

import numpy as np

MEMORY_ONLY_STRENGTH = 1e3
"""All the memory of a plan, in costs of a step, where memory alone counts."""

_SHARPNESS = 30.0
"""How much more the moments of the peak weigh than others."""


def peak_weights(held: np.ndarray) -> np.ndarray:
    """Weights of the moments, which sum to one: most where most is held."""
    weights = np.exp(_SHARPNESS * (held / held.max() - 1.0))
    return np.asarray(weights / weights.sum())


def memory_prices(weights: np.ndarray, strength: float, cost: float, peak: float) -> np.ndarray:
    """Seconds per byte at every moment.

    Args:
        weights: of the moments; they sum to one.
        strength: what a plan's whole memory costs, in costs of a step.
        cost: of a step, in seconds.
        peak: bytes of a plan's whole memory.
    """
    return weights * strength * cost / peak
