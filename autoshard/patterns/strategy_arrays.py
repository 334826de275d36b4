"""All strategies of an operator at once: the combinations that fit, and the steps that a rank runs under each.

These are the functions of `strategy` for one strategy, in arrays over many: on three axes an operator has hundreds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import Choices, fits, partial_kind
from autoshard.size import is_dynamic
from autoshard.specs.axes import MeshShape

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def is_plain(rule: Rule) -> bool:
    """Return True if a rule has one implementation, static sizes and no routed rows, so that arrays describe it."""
    return not rule.variants and not any(factor.routed or is_dynamic(factor.size) for factor in rule.factors)


def fitting_choices(rule: Rule, per_axis: Sequence[Sequence[int]], mesh: MeshShape) -> tuple[Choices, ...]:
    """Return the combinations of a choice per axis that fit, as `strategy.fits` says, in the order of a product."""
    every = tuple(itertools.product(*per_axis))
    if not is_plain(rule):
        return tuple(choices for choices in every if fits(rule, choices, mesh))
    table = np.array(every, dtype=np.int64)
    # Without padding, `fits` only asks that no result is partial in two ways; the padded few are asked one by one.
    even, clear = is_evenly_split(rule, table, mesh), _has_one_reduction(rule, table)
    return tuple(
        choices
        for choices, is_even, is_clear in zip(every, even.tolist(), clear.tolist(), strict=True)
        if (is_clear if is_even else fits(rule, choices, mesh))
    )


def is_evenly_split(rule: Rule, table: IntArray, mesh: MeshShape) -> BoolArray:
    """Return per row of `table` (`[strategies, axes]`) if the axes divide every factor that they split; `is_plain`."""
    even = np.ones(len(table), dtype=np.bool_)
    for index, factor in enumerate(rule.factors):
        even &= factor.size % np.where(table == index, mesh.sizes, 1).prod(axis=1) == 0
    return even


def local_sizes(rule: Rule, table: IntArray, mesh: MeshShape) -> IntArray:
    """Return the steps of every factor on one rank, padding included: `[strategies, factors]`; `is_plain`."""
    local = np.tile([factor.size for factor in rule.factors], (len(table), 1)).astype(np.int64)
    for axis, size in enumerate(mesh.sizes):
        split = table[:, axis, None] == np.arange(len(rule.factors))
        local[split] = -(-local[split] // size)  # the ceiling
    return local


def _has_one_reduction(rule: Rule, table: IntArray) -> BoolArray:
    """Return per row if all axes that leave a result partial leave the same reduction open."""
    clear = np.ones(len(table), dtype=np.bool_)
    for result in range(len(rule.results)):
        # Reductions as numbers, 0 for none: all that are not 0 have to equal the largest.
        kinds: dict[str | None, int] = {None: 0}
        left = np.zeros_like(table)
        for choice in np.unique(table).tolist():
            kind = partial_kind(rule, choice, result)
            left[table == choice] = kinds.setdefault(kind, len(kinds))
        most = left.max(axis=1, initial=0)
        clear &= ((left == 0) | (left == most[:, None])).all(axis=1)
    return clear
