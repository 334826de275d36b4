"""One line of the table: a mesh that was looked at, what its plan is predicted to do, and why it was taken or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.search.shapes import Shape

if TYPE_CHECKING:
    from autoshard.pipeline.plan.pipeline_plan import PipelinePlan

BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCandidate:
    """A mesh that was looked at.

    Attributes:
        shape: the mesh, and which of its axes is a pipeline.
        least_seconds: no step on it takes less.
        least_bytes: no plan on it holds less on every device.
        seconds: predicted time of the step of the fastest plan made; None where none was.
        peak: bytes that a device holds under that plan at most; None likewise.
        plan: the plan itself, where it is the best of all meshes of as many devices.
        verdict: `"best"`, or why not.
    """

    shape: Shape
    least_seconds: float
    least_bytes: int
    seconds: float | None = None
    peak: int | None = None
    plan: ShardingPlan | PipelinePlan | None = field(default=None, repr=False)
    verdict: str = ""

    @property
    def devices(self) -> int:
        """Of the mesh."""
        return self.shape.mesh.size
