"""Rhino 4.4: force the largest parameters to be sharded, as few of them as it takes."""

from __future__ import annotations

from collections.abc import Mapping

_NEGLIGIBLE_SHARE = 1e-2


def names_by_size(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Names from the largest size to the smallest, equal sizes in the order of their names."""
    return tuple(sorted(sizes, key=lambda name: (-sizes[name], name)))


def drop_negligible(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes without the smallest ones, which together are less than a hundredth: to shard them frees little."""
    left, kept = _NEGLIGIBLE_SHARE * sum(sizes.values()), dict(sizes)
    for name in reversed(names_by_size(sizes)):
        left -= sizes[name]
        if left < 0:
            break
        del kept[name]
    return kept


def largest_names(sizes: Mapping[str, int], share: float) -> frozenset[str]:
    """The k largest, k growing with `share` from one at 0 to all at 1, each time by the same factor.

    Source: Rhino 4.4, "Memory Constraints": "We choose the smallest k that provides a feasible solution." Of n
    parameters few are large, which is why k grows by factors.
    """
    return frozenset(names_by_size(sizes)[: round(max(len(sizes), 1) ** share)])
