"""Shares of every microbatch for the ranks of a stage, where their devices are of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.worker_shares import Worker, apportion, shares
from autoshard.pipeline.plan.planned_stage import PlannedStage
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.planner.batch_shares import devices_along, heterogeneous_axis, speeds_of
from autoshard.program.localize import localize
from autoshard.specs.axes import MeshShape

RankShares = Mapping[str, tuple[int, ...]]
"""The name of one axis of a stage's mesh, and the samples of a microbatch per rank; empty for equal shares."""


def proportional_shares(planned: PlannedStage, cluster: Cluster, mesh: MeshShape, samples: int) -> RankShares:
    """Return shares of a microbatch in proportion to speed.

    Args:
        planned: a stage with equal shares; speeds are those of its computation.
        cluster: of the stage's ranks.
        mesh: of the stage.
        samples: in a microbatch.

    Returns:
        The shares along the first axis whose ranks have devices of different kinds; empty where all would be equal, or
        a rank would get no sample.

    Source: Whale 3.3.1, Formula 1.
    """
    axis = heterogeneous_axis(cluster, mesh)
    if axis is None:
        return {}
    devices = devices_along(cluster, mesh, axis)
    speeds = speeds_of(planned.planner, planned.plan, devices)
    counts = shares(samples, [Worker(speeds[device]) for device in devices], lambda _: 0)
    return {mesh.names[axis]: counts} if min(counts) and len(set(counts)) > 1 else {}


def memory_share(given: RankShares, cluster: Cluster, mesh: MeshShape, limit: float) -> float:
    """Return the part of a microbatch that the smallest memory is planned for, relative to an equal share.

    A plan that fits the smallest memory of the stage with this part fits every device with its own share.

    Args:
        given: the shares of the ranks.
        cluster, mesh: of the stage.
        limit: bytes that no device may exceed.
    """
    if not given:
        return 1.0
    ((name, counts),) = given.items()
    memories = [min(device.memory, limit) for device in devices_along(cluster, mesh, mesh.index(name))]
    equal = sum(counts) / len(counts)
    return max(count / equal * min(memories) / memory for count, memory in zip(counts, memories, strict=True))


def scale_to_shares(costs: StageCosts, given: RankShares, part: float) -> StageCosts:
    """Return the costs of a stage with its ranks' shares.

    Args:
        costs: of the stage as if shares were equal; its seconds of compute are those of the last device to finish.
        given: the shares of the ranks.
        part: of a microbatch that they hold (`memory_share`).
    """
    if not given:
        return costs
    (counts,) = given.values()
    largest = max(counts) / sum(counts) * len(counts)  # the message that arrives last
    return replace(
        costs,
        forward_bytes=math.ceil(costs.forward_bytes * largest),
        forward_send_seconds=costs.forward_send_seconds * largest,
        backward_bytes=math.ceil(costs.backward_bytes * largest),
        backward_send_seconds=costs.backward_send_seconds * largest,
        saved_bytes=math.ceil(costs.saved_bytes * part),
        weight_saved_bytes=math.ceil(costs.weight_saved_bytes * part),
        # Gathered parameters are among these bytes, and do not shrink with a share.
        working_bytes=math.ceil(costs.working_bytes * max(part, 1.0)),
    )


def check_uneven_programs(planned: Iterable[PlannedStage]) -> None:
    """Raise `PlanError` if some operator of a stage can't have unequal shares as the stage's plan has it."""
    seen: set[str] = set()
    for stage in planned:
        if stage.plan.shares and stage.plan.fingerprint not in seen:
            planner = stage.planner
            flow = planner.flow_of(stage.plan)
            localize(flow, planner.resharder, planner.mesh.names, shared=planner.constraints.shared)
            seen.add(stage.plan.fingerprint)


def has_sample_per_rank(given: RankShares, samples: int) -> bool:
    """Return True if every rank has a sample of a microbatch of so many samples."""
    return all(samples > 1 and min(apportion(samples, counts)) > 0 for counts in given.values())
