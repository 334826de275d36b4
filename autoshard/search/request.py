"""The request of a search: the model, the options and the limits, for any number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from autoshard.capture.joint import JointGraph
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh, stage_devices
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.search.shapes import PipelineAxis, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a search, for any number of devices.

    Attributes:
        module: the model.
        graph: the captured step.
        capture_seconds: of the capture.
        target: of planning; its memory limit is the bytes that every device may hold.
        pipelines: the position of the axis of pipelines.
        batch: samples of the example call, which microbatches split.
        plan_pipeline: `plan_pipeline` with the captures of the example call.
        own_memory: True if the memory limit is just the memory of the smallest device. Larger devices of a pipeline may
            then hold as much as they have.
    """

    module: nn.Module
    graph: JointGraph
    capture_seconds: float
    target: Target
    pipelines: PipelineAxis
    batch: int
    plan_pipeline: Callable[..., PipelinePlan]
    own_memory: bool = False

    @property
    def pipeline(self) -> Pipeline:
        """The options of pipelines."""
        return self.target.options.pipeline

    @property
    def memory_limit(self) -> int:
        """Bytes that every device may hold."""
        limit = self.target.settings.memory_limit
        assert limit is not None, "a search has a limit: at least what a device has"
        return limit

    def device_memory(self, shape: Shape) -> float:
        """Return the bytes that a device of a mesh may hold; of a pipeline, the mean over its ranks."""
        if shape.axis is None or not self.own_memory:
            return self.memory_limit
        devices = stage_devices(self.target.cluster, PipelineMesh.of(shape.mesh, shape.axis))
        return sum(device.memory for device in devices) / len(devices)

    @property
    def microbatch_numbers(self) -> list[int]:
        """The numbers of microbatches that a pipeline may have."""
        divisors = [number for number in range(1, self.batch + 1) if self.batch % number == 0]
        return [number for number in divisors if self.pipeline.microbatches in ("auto", number)] or divisors

    def feasible_numbers(self, shape: Shape) -> list[int]:
        """Return the numbers with a sample in a microbatch for every device of a stage; all numbers if there are none.

        In a stage of several hosts, the devices of a host may share a sample.
        """
        host = self.target.cluster.devices_per_host
        least = shape.devices_per_rank // host if shape.devices_per_rank > host else shape.devices_per_rank
        large = [number for number in self.microbatch_numbers if self.batch // number >= least]
        return large or self.microbatch_numbers
