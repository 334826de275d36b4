"""What the search knows of one mesh, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.errors import BudgetError
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.mesh_candidate import BEST, MeshCandidate
from autoshard.search.shapes import Shape
from autoshard.units import format_bytes

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
    from autoshard.pipeline.plan.shape_planner import PipelineShape, PlannedShape


@dataclass(frozen=True, slots=True)
class UnlimitedResult:
    """What a plan does that was made without a limit on memory, and holds too much: seconds, and bytes."""

    seconds: float
    peak: int


@dataclass(slots=True)
class Row:
    """What is known of one mesh so far.

    Attributes:
        shape, least_seconds, least_bytes, verdict: as of a `Candidate`.
        seconds, peak: of the fastest plan known, be it one that holds too much.
        free: the latter, where there is one.
        plan: the fastest that fits.
        planner: that made a plan without a limit on memory: what it has worked out serves others on the same mesh.
        sizes: those of a pipeline that were planned, by the effort with which they were.
        needs: the smallest peak found, where none fits.
        settled: whether more effort is all that could make the plan better.
        estimate: seconds that a pipeline was estimated to take before it was planned.
        took: seconds in which its last plan was made.
    """

    shape: Shape
    least_seconds: float
    least_bytes: int
    seconds: float | None = None
    peak: int | None = None
    plan: ShardingPlan | PipelinePlan | None = None
    verdict: str = ""
    planner: Planner | None = None
    planned_shapes: dict[str, dict[PipelineShape, PlannedShape]] = field(default_factory=dict)
    unlimited: UnlimitedResult | None = None
    smallest_peak: int | None = None
    covers_all_shapes: bool = True
    estimate: float | None = None
    took: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of the step, infinite where no plan is known."""
        return math.inf if self.seconds is None else self.seconds

    def next_planning_seconds(self, effort: str) -> float:
        """Seconds until another plan is there, at least: the last one's, or those of another size of a pipeline."""
        return max((one.took for one in self.planned_shapes.get(effort, {}).values()), default=self.took)

    def add_plan(self, plan: ShardingPlan | PipelinePlan) -> None:
        """Note a plan, unless the one that there is is faster."""
        if self.plan is None or plan.step_seconds < self.step_seconds:
            self.plan, self.seconds = plan, plan.step_seconds
            self.peak = plan.memory.peak if isinstance(plan, ShardingPlan) else max(plan.peaks)

    def candidate(self, best: Row | None) -> MeshCandidate:
        """The line of the table, given the best mesh."""
        verdict = self.verdict
        if self is best:
            verdict = BEST
        elif self.plan is not None and best is not None:
            verdict = f"{self.step_seconds / best.step_seconds - 1:.1%} slower"
        return MeshCandidate(
            shape=self.shape,
            least_seconds=self.least_seconds,
            least_bytes=self.least_bytes,
            seconds=self.seconds if self.plan is not None else None,
            peak=self.peak if self.plan is not None else None,
            plan=self.plan if self is best else None,
            verdict=verdict,
        )


def no_mesh_fits_error(rows: Sequence[Row], devices: int, limit: int) -> BudgetError | None:
    """The error that names the smallest need of all meshes; None where none is known to need too much."""
    large = [row for row in rows if row.smallest_peak is not None or row.least_bytes > limit]
    if not large:
        return None
    leanest = min(large, key=lambda row: row.smallest_peak or row.least_bytes)
    needs, how = (
        leanest.smallest_peak or leanest.least_bytes,
        "the smallest peak found is" if leanest.smallest_peak else "at least",
    )
    return BudgetError(
        f"no mesh of {devices} devices fits in {format_bytes(limit)} per device: {how} {format_bytes(needs)}, on "
        f"{leanest.shape}. Raise memory_limit to {needs} bytes, use more devices or ones with more memory, or make the "
        f"batch smaller.",
        needs,
    )
