"""One line of the table of a search: a mesh, the prediction of its plan, and its verdict."""

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
    """A mesh of a search.

    Attributes:
        shape: the mesh, and its pipeline axis.
        least_seconds: lower bound of the seconds of its step.
        least_bytes: lower bound of the bytes that every device holds.
        seconds: predicted time of the step of its fastest plan; None where it has no plan.
        peak: bytes that a device holds under that plan at most; None likewise.
        plan: the plan, if it is the best of all meshes of as many devices.
        verdict: `"best"`, or the reason why not.
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
        """The number of devices."""
        return self.shape.mesh.size
