"""What a pipeline on a mesh may take, before its stages are planned: it says which mesh to plan next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import AutoshardError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.assign.placement import stage_devices
from autoshard.pipeline.plan.pipeline_devices import slowest_cluster, stage_cluster, stage_target
from autoshard.search.mesh_planner import MeshPlanner
from autoshard.search.shapes import Shape

_PARTS = 3
"""Of the work of a microbatch: forward, the gradients of what stages receive, and those of parameters, about alike."""

_HALVINGS = 20
"""Of what is not known of the longest stage: a millionth of it is left."""


class PipelineEstimates:
    """Estimates the steps of pipelines by plans of the whole step on the devices of one stage.

    If one stage's devices took T seconds for all work of a step, the stage that takes longest takes its share of that,
    where stages are stretches of the operators in their order and as equal as they can be; and the last stage waits for
    the forward of the first microbatch in all others. That is what a pipeline takes whose messages are free, and whose
    parameters are gathered once per step: as a rule, less than it takes.

    Args:
        plans: of the same search.
        shares: of the work, what every operator is, in their order.
    """

    def __init__(self, plans: MeshPlanner, shares: Sequence[float]) -> None:
        self._mesh_planner = plans
        self._shares = shares
        self._whole: dict[tuple[tuple[int, ...], int], float] = {}

    def seconds(self, shape: Shape, numbers: Iterable[int]) -> float:
        """What a step takes, with the best of some numbers of microbatches; 0 where that can't be said."""
        options = self._mesh_planner.request.target
        assert shape.axis is not None
        speeds = [device.speed for device in stage_devices(options.cluster, PipelineMesh.of(shape.mesh, shape.axis))]
        least = min((shape.ranks - 1) / (_PARTS * number) for number in numbers)
        return self._whole_step_seconds(shape) * longest_stage(self._shares, speeds) * (1 + least)

    def _whole_step_seconds(self, shape: Shape) -> float:
        """Seconds of the whole step on the devices of one stage, however much they would hold."""
        assert shape.axis is not None
        mesh = PipelineMesh.of(shape.mesh, shape.axis).stage(0)
        slowest = slowest_cluster(self._mesh_planner.request.target.cluster, shape.mesh.size)
        cluster = stage_cluster(slowest, shape.mesh, shape.axis)
        key = mesh.sizes, cluster.devices_per_host
        if key not in self._whole:
            options = self._mesh_planner.target("fast", limited=False)
            options = replace(options, settings=replace(options.settings, recompute="none"))
            try:
                self._whole[key] = self._mesh_planner.plan_on(mesh, stage_target(options, cluster)).step_seconds
            except AutoshardError:
                self._whole[key] = 0.0
        return self._whole[key]


def longest_stage(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """Of all work on a device of speed 1, the part of its time that the stage takes which takes longest, at least.

    Args:
        shares: of the work, what every operator is, in their order; stages are stretches of it.
        speeds: of the devices of every stage.
    """
    ends = np.cumsum([0.0, *shares])

    def is_enough(limit: float) -> bool:
        done = 0
        for speed in speeds:
            done = int(np.searchsorted(ends, ends[done] + limit * speed, side="right")) - 1
        return done == len(shares)

    low = 1 / sum(speeds)
    high = low + max(shares, default=0.0) / min(speeds)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
