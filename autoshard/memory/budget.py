"""Parts of a search for a plan within a memory limit: parameters to shard, prices of memory, bisection over plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

Plan = TypeVar("Plan")
Measure = Callable[[Plan], tuple[float, int]]

MEMORY_ONLY_STRENGTH = 1e3
"""All the memory of a plan, in costs of a step, where memory alone counts."""

# A moment that holds a tenth less than the peak weighs exp(-3), a twentieth, of it. A guess that works.
_SHARPNESS = 30.0

_NEGLIGIBLE_SHARE = 1e-2  # of all bytes; a guess that works


def names_by_size(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names from the largest size to the smallest, equal sizes in the order of their names."""
    return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))


def drop_negligible(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes without the smallest, which together are less than a hundredth: sharding them frees little."""
    left, kept = _NEGLIGIBLE_SHARE * sum(sizes.values()), dict(sizes)
    for name in reversed(names_by_size(sizes)):
        left -= sizes[name]
        if left < 0:
            break
        del kept[name]
    return kept


def largest_names(sizes: Mapping[str, int], share: float) -> frozenset[str]:
    """Return the names of the k largest sizes; k grows geometrically from 1 at `share` 0 to all at 1.

    Source: Rhino 4.4, "Memory Constraints": "We choose the smallest k that provides a feasible solution."
    """
    # Few of the parameters are large, so steps of equal factors in k are steps of about equal bytes.
    return frozenset(names_by_size(sizes)[: round(max(len(sizes), 1) ** share)])


def peak_weights(held: np.ndarray) -> np.ndarray:
    """Return weights of the moments, summing to one, from the bytes held at each: most where most is held."""
    weights = np.exp(_SHARPNESS * (held / held.max() - 1.0))
    return np.asarray(weights / weights.sum())


def memory_prices(weights: np.ndarray, strength: float, cost: float, peak: float) -> np.ndarray:
    """Return seconds per byte at every moment.

    Args:
        weights: of the moments; they sum to one.
        strength: cost of a plan's whole memory, in costs of a step.
        cost: of a step, in seconds.
        peak: bytes of a plan's whole memory.
    """
    return weights * strength * cost / peak


def first_that_fits(
    fastest: Plan,
    leanest: Plan,
    levels: int,
    make: Callable[[int], Plan],
    measure: Measure[Plan],
    limit: int,
    tolerance: float = 0.0,
    begin: int | None = None,
) -> Plan:
    """Return the fastest plan within a limit among those of several levels, making few of them.

    A plan made at the middle of an interval is left out unless it lies between the interval's two ends, both in
    seconds and in bytes. The plans that remain form one row for all limits, in which bytes fall and seconds rise,
    whatever `make` returns, and no limit gives a slower plan than this row has for it.

    Args:
        fastest: a plan that does not fit.
        leanest: a plan that fits.
        levels: number of plans that can be made between these.
        make: makes the plan of a level, from 1, next to the fastest, to `levels`, next to the leanest.
        measure: seconds and bytes of a plan.
        limit: bytes that a plan may hold.
        tolerance: share of a plan's seconds by which two may differ and no plan between them is made.
        begin: the first level to make, by default the middle: a good first plan rules out worse ones near it.
    """
    low, high, left, right = fastest, leanest, 0, levels + 1
    fitting = [leanest]
    while right - left > 1 and measure(high)[0] > (1.0 + tolerance) * measure(low)[0]:
        middle = (left + right) // 2 if begin is None or not left < begin < right else begin
        plan = make(middle)
        seconds, held = measure(plan)
        if held <= limit:
            fitting.append(plan)
        if seconds < measure(low)[0] or held >= measure(low)[1]:
            left = middle  # outside the interval at the fast end: left out for every limit
        elif seconds > measure(high)[0] or held <= measure(high)[1]:
            right = middle  # outside it at the lean end
        elif held <= limit:
            high, right = plan, middle
        else:
            low, left = plan, middle
    # A plan that was left out is taken where it fits and is faster than the row's.
    return min((high, *fitting), key=lambda plan: measure(plan)[0])
