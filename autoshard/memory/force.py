"""Rhino 4.4: force the largest parameters to be sharded, as few of them as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


def by_size(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Names from the largest size to the smallest, equal sizes in the order of their names."""
    return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))


def smallest_feasible_k(
    sizes: Mapping[str, int], fits: Callable[[frozenset[str]], Result | None]
) -> tuple[int, Result] | None:
    """The smallest k such that forcing the k largest parameters to be sharded gives a plan that fits.

    Forcing more is taken to save more memory, never less: k is found by galloping (0, 1, 2, 4, ...) and then
    bisection between the last k that failed and the first that did not, so that a small k, which is common, costs
    few calls. No k is tried twice.

    Args:
        sizes: bytes of every parameter that may be forced.
        fits: makes a plan under which none of the given parameters is replicated; None where none fits.

    Returns:
        k and what `fits` returned for it, or None where nothing fits even with every parameter forced.

    Source: Rhino 4.4, "Memory Constraints": "We choose the smallest k that provides a feasible solution."
    """
    order = by_size(sizes)
    failed, k = -1, 0
    result = fits(frozenset())
    while result is None:
        if k == len(order):
            return None
        failed, k = k, min(max(2 * k, 1), len(order))
        result = fits(frozenset(order[:k]))
    while k - failed > 1:
        middle = (failed + k) // 2
        better = fits(frozenset(order[:middle]))
        if better is None:
            failed = middle
        else:
            k, result = middle, better
    return k, result
