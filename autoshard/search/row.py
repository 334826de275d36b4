"""The state of one mesh in the search, and the error where no mesh fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoshard.errors import BudgetError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.shape_planner import PipelineShape, PlannedShape
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.shapes import Shape
from autoshard.solver.candidate_search import Candidate
from autoshard.units import format_bytes


@dataclass(frozen=True, slots=True)
class UnlimitedResult:
    """Seconds and bytes of a plan that was made without a memory limit, and holds too much."""

    seconds: float
    peak: int


@dataclass(slots=True, kw_only=True, eq=False)
class Row(Candidate):
    """The state of one mesh in the search. `seconds` and `peak` are of its fastest plan, even if that holds too much.

    Attributes:
        shape: the mesh, and its pipeline axis.
        least_bytes: a lower bound of what each device holds.
        peak: bytes that a device holds at most.
        plan: the fastest plan that fits.
        planner: of the plan without a memory limit; what it has worked out serves other plans on the same mesh.
        planned_shapes: of a pipeline, those that were planned, by the effort.
        unlimited: the result of the plan without a memory limit, if that holds too much.
        smallest_peak: the smallest peak found, where no plan fits.
        covers_all_shapes: True if only more effort could make the plan better.
        estimate: seconds that a pipeline was estimated to take before it was planned.
        took: seconds in which its last plan was made.
    """

    shape: Shape
    least_bytes: int
    peak: int | None = None
    plan: ShardingPlan | PipelinePlan | None = None
    planner: Planner | None = None
    planned_shapes: dict[str, dict[PipelineShape, PlannedShape]] = field(default_factory=dict)
    unlimited: UnlimitedResult | None = None
    smallest_peak: int | None = None
    covers_all_shapes: bool = True
    estimate: float | None = None
    took: float = 0.0

    def next_planning_seconds(self, effort: str) -> float:
        """Return the least seconds until another plan: those of the last one, or of another shape of a pipeline."""
        return max((planned.took for planned in self.planned_shapes.get(effort, {}).values()), default=self.took)

    def add_plan(self, plan: ShardingPlan | PipelinePlan) -> None:
        """Keep a plan, unless the present one is faster."""
        if self.plan is None or plan.step_seconds < self.step_seconds:
            self.plan, self.seconds = plan, plan.step_seconds
            self.peak = plan.memory.peak if isinstance(plan, ShardingPlan) else max(plan.peaks)


def no_mesh_fits_error(rows: Sequence[Row], devices: int, limit: int) -> BudgetError | None:
    """Return the error that names the smallest need of all meshes; None where no mesh is known to need too much."""
    large = [row for row in rows if row.smallest_peak is not None or row.least_bytes > limit]
    if not large:
        return None
    leanest = min(large, key=lambda row: row.smallest_peak or row.least_bytes)
    needs = leanest.smallest_peak or leanest.least_bytes
    how = "the smallest peak found is" if leanest.smallest_peak else "at least"
    return BudgetError(
        f"no mesh of {devices} devices fits in {format_bytes(limit)} per device: {how} {format_bytes(needs)}, on "
        f"{leanest.shape}. Raise memory_limit to {needs} bytes, use more devices or ones with more memory, or make the "
        f"batch smaller.",
        needs,
    )
