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
"""For one axis of a stage's mesh by name, what its ranks take of a microbatch; empty for equal shares."""


def proportional_shares(planned: PlannedStage, cluster: Cluster, mesh: MeshShape, samples: int) -> RankShares:
    """Shares of a microbatch in proportion to speed.

    Args:
        planned: a stage with equal shares: devices are as fast as they would compute what it has to.
        cluster: of the stage's ranks.
        mesh: of the stage.
        samples: in a microbatch.

    Returns:
        The shares along the first axis whose ranks have devices of different kinds; none where all are equal, or one
        would get no sample.

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
    """How much a stage's devices hold of a microbatch, in times of an equal share, for the smallest memory of them.

    What fits the smallest memory with so much of it, fits every device with its own share.

    Args:
        given: what the ranks take.
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
    """Costs of a stage whose devices take such shares, planned as if they were equal.

    Args:
        costs: of the stage; its seconds of compute are those of the device that is done last.
        given: what its ranks take.
        part: what they hold of a microbatch (`memory_share`).
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
        # Parameters that are gathered are among these, and do not grow or shrink.
        working_bytes=math.ceil(costs.working_bytes * max(part, 1.0)),
    )


def check_uneven_programs(planned: Iterable[PlannedStage]) -> None:
    """`PlanError` if some operator of a stage can't have shares of its own as the stage's plan has it."""
    seen: set[str] = set()
    for one in planned:
        if one.plan.shares and one.plan.fingerprint not in seen:
            planner = one.planner
            localize(
                planner.flow_of(one.plan), planner.resharder, planner.mesh.names, shared=planner.constraints.shared
            )
            seen.add(one.plan.fingerprint)


def has_sample_per_rank(given: RankShares, samples: int) -> bool:
    """Whether every rank has something of a microbatch of so many samples."""
    return all(samples > 1 and min(apportion(samples, counts)) > 0 for counts in given.values())
