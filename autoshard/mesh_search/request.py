"""What is searched for, whatever the number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.capture.joint import JointGraph
from autoshard.mesh_search.shapes import Pipeline, Shape
from autoshard.options import Options

if TYPE_CHECKING:
    from autoshard.pipelined.plan import PipelinePlan

PlanPipeline = Callable[..., "PipelinePlan"]
"""`autoshard.pipelined.planning.plan_pipeline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is searched for, whatever the number of devices.

    Attributes:
        module, args, kwargs: the model and an example call.
        graph: the captured step.
        capture_seconds: that its capture took.
        options: of planning, with the bytes that a device may hold as memory limit.
        pipeline: where the axis of pipelines lies.
        schedule, microbatches, virtual: of pipelines, as `plan_pipeline` takes them.
        batch: how many samples there are to make microbatches of.
        plan_pipeline: plans a pipeline on a mesh.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: JointGraph
    capture_seconds: float
    options: Options
    pipeline: Pipeline
    schedule: str
    microbatches: int | str
    virtual: int | str
    batch: int
    plan_pipeline: PlanPipeline

    @property
    def memory_limit(self) -> int:
        """Bytes that a device may hold."""
        limit = self.options.settings.memory_limit
        assert limit is not None, "a search has a limit: at least what a device has"
        return limit

    @property
    def numbers(self) -> list[int]:
        """Of microbatches that a pipeline may have."""
        divisors = [number for number in range(1, self.batch + 1) if self.batch % number == 0]
        return [number for number in divisors if self.microbatches in ("auto", number)] or divisors

    def numbers_of(self, shape: Shape) -> list[int]:
        """Of these the numbers with a sample in a microbatch for every device of a stage; all where there are none."""
        large = [number for number in self.numbers if self.batch // number >= shape.devices_per_rank]
        return large or self.numbers
