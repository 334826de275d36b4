"""Why a mesh is not worth a plan, by what plans of others tell: experience, no bounds."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.search.row import Row
from autoshard.search.shapes import coarser_shapes
from autoshard.units import format_seconds

_FAR_FACTOR = 1.3
"""A mesh slower than the best by more is not made the best by splitting an axis of it over the same links: that gains a
few percent, as a rule."""

_LONGER_FACTOR = 1.15
"""A pipeline slower than the best by more is not made the best by more stages, where fewer were faster."""

CLOSE_FACTOR = 1.03
"""A mesh is planned where it is estimated to be slower than the best by less: estimates are a few percent off."""

_SAME = 1 + 1e-9
"""Times that differ by less are equal: the same sums, rounded in another order."""


def unpromising_reason(row: Row, rows: Sequence[Row], best: Row, cluster: Cluster) -> str | None:
    """Why a mesh is not worth a plan, by plans of the same mesh with axes joined, or of shorter pipelines."""
    far = _FAR_FACTOR * best.step_seconds
    for coarser in coarser_shapes(row.shape, cluster):
        known = next((other for other in rows if other.shape == coarser), None)
        if known is not None and known.seconds is not None and known.seconds > far:
            slower = known.seconds / best.step_seconds - 1
            return f"not planned: {coarser}, which has two of its axes joined, is {slower:.0%} slower"
    shorter = [other for other in rows if other.seconds is not None and 1 < other.shape.ranks < row.shape.ranks]
    shorter.sort(key=lambda other: (other.shape.ranks, other.step_seconds))
    if (
        len(shorter) > 1
        and max(shorter[-2].step_seconds * _SAME, _LONGER_FACTOR * best.step_seconds) < shorter[-1].step_seconds
    ):
        slower = shorter[-1].step_seconds / best.step_seconds - 1
        return f"not planned: the shorter pipeline {shorter[-1].shape} is {slower:.0%} slower already"
    return None


def slow_pipeline_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Why a pipeline that is estimated is not worth a plan: by how little estimates of others fell short."""
    assert row.estimate is not None
    short = min((one.step_seconds / one.estimate for one in rows if one.plan and one.estimate), default=1.0)
    if row.estimate * short <= CLOSE_FACTOR * best.step_seconds:
        return None
    return f"not planned: it is estimated to take {format_seconds(row.estimate * short)}"


def slow_within_limit_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Why a mesh that holds too much is not worth a plan within the limit.

    Without a limit it is no faster than the best; or it would not be within it, if the limit took as much as it took
    where least was lost of those meshes that held no more without it.
    """
    assert row.unlimited is not None
    if row.unlimited.seconds >= best.step_seconds:
        return f"without a memory limit it takes {format_seconds(row.unlimited.seconds)} already"
    fitted = [one for one in rows if one.plan and one.unlimited and one.unlimited.peak <= row.unlimited.peak]
    lost = min((one.step_seconds / one.unlimited.seconds for one in fitted if one.unlimited), default=1.0)
    if row.unlimited.seconds * lost <= CLOSE_FACTOR * best.step_seconds:
        return None
    return (
        f"not planned: within the memory limit it is estimated to take {format_seconds(row.unlimited.seconds * lost)}"
    )
