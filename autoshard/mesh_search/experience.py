"""Why a mesh is not worth a plan, by what plans of others tell: experience, no bounds."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.mesh_search.row import Row
from autoshard.mesh_search.shapes import joined
from autoshard.plan_rows import format_seconds

_FAR = 1.3
"""A mesh slower than the best by more is not made the best by splitting an axis of it over the same links: that gains a
few percent, as a rule."""

_LONGER = 1.15
"""A pipeline slower than the best by more is not made the best by more stages, where fewer were faster."""

CLOSE = 1.03
"""A mesh is planned where it is estimated to be slower than the best by less: estimates are a few percent off."""

_SAME = 1 + 1e-9
"""Times that differ by less are equal: the same sums, rounded in another order."""


def unpromising(row: Row, rows: Sequence[Row], best: Row, cluster: Cluster) -> str | None:
    """Why a mesh is not worth a plan, by plans of the same mesh with axes joined, or of shorter pipelines."""
    far = _FAR * best.speed
    for coarser in joined(row.shape, cluster):
        known = next((other for other in rows if other.shape == coarser), None)
        if known is not None and known.seconds is not None and known.seconds > far:
            slower = known.seconds / best.speed - 1
            return f"not planned: {coarser}, which has two of its axes joined, is {slower:.0%} slower"
    shorter = [other for other in rows if other.seconds is not None and 1 < other.shape.ranks < row.shape.ranks]
    shorter.sort(key=lambda other: (other.shape.ranks, other.speed))
    if len(shorter) > 1 and max(shorter[-2].speed * _SAME, _LONGER * best.speed) < shorter[-1].speed:
        slower = shorter[-1].speed / best.speed - 1
        return f"not planned: the shorter pipeline {shorter[-1].shape} is {slower:.0%} slower already"
    return None


def slow_pipeline(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Why a pipeline that is estimated is not worth a plan: by how little estimates of others fell short."""
    assert row.estimate is not None
    short = min((one.speed / one.estimate for one in rows if one.plan and one.estimate), default=1.0)
    if row.estimate * short <= CLOSE * best.speed:
        return None
    return f"not planned: it is estimated to take {format_seconds(row.estimate * short)}"


def slow_within_limit(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Why a mesh that holds too much is not worth a plan within the limit.

    Without a limit it is no faster than the best; or it would not be within it, if the limit took as much as it took
    where least was lost of those meshes that held no more without it.
    """
    assert row.free is not None
    if row.free.seconds >= best.speed:
        return f"without a memory limit it takes {format_seconds(row.free.seconds)} already"
    fitted = [one for one in rows if one.plan and one.free and one.free.peak <= row.free.peak]
    lost = min((one.speed / one.free.seconds for one in fitted if one.free), default=1.0)
    if row.free.seconds * lost <= CLOSE * best.speed:
        return None
    return f"not planned: within the memory limit it is estimated to take {format_seconds(row.free.seconds * lost)}"
