"""Reasons why a mesh is not worth a plan, by the plans of other meshes: experience, no bounds."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.search.row import Row
from autoshard.search.shapes import coarser_shapes
from autoshard.solver.candidate_search import SAME
from autoshard.units import format_seconds

_FAR_FACTOR = 1.3
"""If a mesh is slower than the best by more, the meshes that split one of its axes over the same links are not planned:
a split gains a few percent, as a rule."""

_LONGER_FACTOR = 1.15
"""If a pipeline is slower than the best by more and shorter ones are faster, longer ones are not planned."""

CLOSE_FACTOR = 1.03
"""A mesh is planned if it is estimated to be slower than the best by less: estimates are a few percent off."""


def unpromising_reason(row: Row, rows: Sequence[Row], best: Row, cluster: Cluster) -> str | None:
    """Return why a mesh is not worth a plan, by plans of the same mesh with axes joined, or of shorter pipelines."""
    far = _FAR_FACTOR * best.step_seconds
    for coarser in coarser_shapes(row.shape, cluster):
        known = next((candidate for candidate in rows if candidate.shape == coarser), None)
        if known is not None and known.seconds is not None and known.seconds > far:
            slower = known.seconds / best.step_seconds - 1
            return f"not planned: {coarser}, which has two of its axes joined, is {slower:.0%} slower"
    shorter = [known for known in rows if known.seconds is not None and 1 < known.shape.ranks < row.shape.ranks]
    shorter.sort(key=lambda known: (known.shape.ranks, known.step_seconds))
    if len(shorter) > 1:
        longest = shorter[-1].step_seconds
        if max(shorter[-2].step_seconds * SAME, _LONGER_FACTOR * best.step_seconds) < longest:
            slower = longest / best.step_seconds - 1
            return f"not planned: the shorter pipeline {shorter[-1].shape} is {slower:.0%} slower already"
    return None


def slow_pipeline_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Return why a pipeline is not worth a plan, by its estimate and those of planned pipelines; None where it is."""
    assert row.estimate is not None
    # Estimates fall short of plans. The factor is the smallest one of the planned pipelines.
    factor = min((known.step_seconds / known.estimate for known in rows if known.plan and known.estimate), default=1.0)
    if row.estimate * factor <= CLOSE_FACTOR * best.step_seconds:
        return None
    return f"not planned: it is estimated to take {format_seconds(row.estimate * factor)}"


def slow_within_limit_reason(row: Row, rows: Sequence[Row], best: Row) -> str | None:
    """Return why a mesh that holds too much is not worth a plan within the limit; None where it is."""
    assert row.unlimited is not None
    if row.unlimited.seconds >= best.step_seconds:
        return f"without a memory limit it takes {format_seconds(row.unlimited.seconds)} already"
    # The limit costs at least as much as it cost other meshes that held no more without it; the smallest factor counts.
    factors = (
        known.step_seconds / known.unlimited.seconds
        for known in rows
        if known.plan and known.unlimited and known.unlimited.peak <= row.unlimited.peak
    )
    estimate = row.unlimited.seconds * min(factors, default=1.0)
    if estimate <= CLOSE_FACTOR * best.step_seconds:
        return None
    return f"not planned: within the memory limit it is estimated to take {format_seconds(estimate)}"
