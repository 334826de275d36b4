"""Estimated seconds of a pipeline on a mesh, before its stages are planned: they decide which mesh to plan next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from autoshard.errors import AutoshardError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh, stage_devices
from autoshard.pipeline.plan.pipeline_devices import slowest_cluster, stage_cluster, stage_target
from autoshard.search.mesh_planner import MeshPlanner
from autoshard.search.shapes import Shape

_PARTS = 3
"""The parts of the work of a microbatch, about equal: forward, gradients of received tensors, and of parameters."""

_HALVINGS = 20
"""Steps of the bisection for the longest stage: a millionth of the interval is left."""


class PipelineEstimates:
    """Estimates the steps of pipelines by plans of the whole step on the devices of one stage.

    If one stage's devices take T seconds for all work of a step, the longest stage takes its share of T, where stages
    are stretches of the operators in their order, as equal as possible; and the last stage waits for the forward of the
    first microbatch in all others. Such a pipeline has free messages, and gathers its parameters once per step: as a
    rule, a real one takes longer.

    Args:
        mesh_planner: of the same search.
        shares: the share of every operator in the work, in their order.
    """

    def __init__(self, mesh_planner: MeshPlanner, shares: Sequence[float]) -> None:
        self._mesh_planner = mesh_planner
        self._shares = shares
        self._whole: dict[tuple[tuple[int, ...], int], float] = {}

    def seconds(self, shape: Shape, numbers: Iterable[int]) -> float:
        """Return the seconds of a step with the best of some numbers of microbatches; 0 where there is no estimate."""
        cluster = self._mesh_planner.request.target.cluster
        assert shape.axis is not None
        speeds = [device.speed for device in stage_devices(cluster, PipelineMesh.of(shape.mesh, shape.axis))]
        least = min((shape.ranks - 1) / (_PARTS * number) for number in numbers)
        return self._whole_step_seconds(shape) * longest_stage(self._shares, speeds) * (1 + least)

    def _whole_step_seconds(self, shape: Shape) -> float:
        """Return the seconds of the whole step on the devices of one stage, without a memory limit."""
        assert shape.axis is not None
        mesh = PipelineMesh.of(shape.mesh, shape.axis).stage(0)
        slowest = slowest_cluster(self._mesh_planner.request.target.cluster, shape.mesh.size)
        cluster = stage_cluster(slowest, shape.mesh, shape.axis)
        key = mesh.sizes, cluster.devices_per_host
        if key not in self._whole:
            target = self._mesh_planner.target("fast", limited=False)
            target = replace(target, settings=replace(target.settings, recompute="none"))
            try:
                self._whole[key] = self._mesh_planner.plan_on(mesh, stage_target(target, cluster)).step_seconds
            except AutoshardError:
                self._whole[key] = 0.0
        return self._whole[key]


def longest_stage(shares: Sequence[float], speeds: Sequence[float]) -> float:
    """Return the time of the longest stage, relative to that of all work on a device of speed 1.

    Args:
        shares: the share of every operator in the work, in their order; stages are stretches of it.
        speeds: of the devices of every stage.
    """
    ends = np.cumsum([0.0, *shares])

    def is_enough(limit: float) -> bool:
        # Every stage takes as many operators as it can compute within the limit.
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
