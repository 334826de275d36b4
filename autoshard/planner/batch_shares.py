"""Shares of the batch for devices of different kinds: which, and whether they make the step shorter (Whale, 3.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard.capture.fake_module import DEVICE
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.worker_shares import Worker, equal_share_device, shares
from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.memory.footprint import Memory
from autoshard.planner.planner import Planner
from autoshard.planner.planning import batch_of, flow_of, run_planner
from autoshard.planner.share_prices import SharePrices
from autoshard.planner.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.size_generic import size_generic_step
from autoshard.specs.axes import MeshShape

MakePlanner = Callable[[JointGraph, Target], Planner]
"""Makes the planner of a graph under some options."""

_PERSISTENT_KINDS = ("parameter", "gradient", "optimizer", "buffer")


def with_shares(target: Target, mesh: MeshShape, given: Mapping[str, Sequence[int]]) -> Target:
    """The options with these shares in place of `"auto"`, and with prices at which every rank is done in time.

    Args:
        options: as the user gave them.
        mesh: what is planned for.
        given: for one mesh axis by name what its ranks take; empty for equal shares. A single rank takes all.

    Raises:
        MeshError: the mesh has no such axis.
        PlanError: there are not as many shares as ranks.
    """
    if not given:
        return replace(target, shares=None)
    ((name, counts),) = given.items()
    axis = mesh.index(name)
    if len(counts) != mesh.sizes[axis]:
        raise PlanError(f"axis {name!r} has {mesh.sizes[axis]} ranks and {len(counts)} shares: give one to each.")
    if len(counts) == 1:
        return replace(target, shares=None)
    device = equal_share_device(devices_along(target.cluster, mesh, axis), counts)
    return replace(
        target, shares={name: tuple(counts)}, cluster=replace(target.cluster.first(mesh.size), device=device)
    )


def plan_batch_shares(
    graph: JointGraph, mesh: MeshShape, target: Target, capture_seconds: float, planner_of: MakePlanner
) -> ShardingPlan:
    """The faster one of two plans: of equal shares of the batch, and of shares in proportion to speed.

    The second is looked for where devices along some axis of the mesh differ, and the ranks of an axis can take shares:
    the batch is a dynamic size, inputs are global, and outputs come back whole. Shares are moved where memory is short,
    by what the plan holds of a batch. Equal shares stay where there is no room for others, some rank would get none, or
    an operator needs equal ones.

    Args:
        graph, mesh: what is planned.
        options: with `shares="auto"`.
        capture_seconds: that the capture of the graph took.
        planner_of: makes planners.

    Raises:
        AutoshardError: as for `autoshard.plan`.

    Source: Whale 3.3.1, Formula 1 and Algorithm 1.
    """

    def plan_counts(given: Mapping[str, Sequence[int]]) -> tuple[ShardingPlan, Planner]:
        own = with_shares(target, mesh, given)
        planner = planner_of(graph, own)
        return plan_with_shares(planner, capture_seconds, own), planner

    equal = plan_counts({})
    axis = heterogeneous_axis(target.cluster, mesh)
    batch = None if graph.dynamic is None else batch_of(graph)
    if axis is None or batch is None or target.inputs == "local" or target.output_placements is not None:
        return equal[0]
    assert graph.dynamic is not None
    total = int(graph.dynamic.example[batch])
    return faster_plan(equal, mesh, target, axis, total, lambda counts: plan_counts({mesh.names[axis]: counts}))


def faster_plan(
    equal: tuple[ShardingPlan, Planner],
    mesh: MeshShape,
    target: Target,
    axis: int,
    total: int,
    planned: Callable[[Sequence[int]], tuple[ShardingPlan, Planner]],
) -> ShardingPlan:
    """The faster one of a plan of equal shares, and of one of shares in proportion to speed, as memory allows.

    Args:
        equal: the first, and its planner.
        mesh, options: what is planned for.
        axis: of the mesh, along which devices differ.
        total: of what is shared.
        planned: makes a plan, and its planner, of what every rank along the axis takes.
    """
    limit = target.settings.memory_limit
    devices = devices_along(target.cluster, mesh, axis)
    speeds = speeds_of(equal[1], equal[0], devices)
    workers = [Worker(speeds[one], min(one.memory, limit or one.memory)) for one in devices]
    counts = shares(total, [replace(one, memory=float("inf")) for one in workers], lambda _: 0)
    try:
        for _ in range(2):  # by speed alone, and once more where that is too much for some device
            if min(counts) < 1 or len(set(counts)) == 1:
                return equal[0]
            uneven, planner = planned(counts)
            memory_of = _memory_by_rows(uneven.memory, total / len(workers))
            before, counts = counts, shares(total, workers, memory_of)
            if counts == before:
                room = min(one.memory - memory_of(count) for one, count in zip(workers, counts, strict=True))
                uneven = replace(uneven, device_memory=int(uneven.memory.peak + room))
                if uneven.step_seconds < equal[0].step_seconds:
                    check_program(planner, uneven)
                    return uneven
    except (BudgetError, PlanError):
        pass  # there is no room for other shares, or an operator needs equal ones
    return equal[0]


def check_program(planner: Planner, plan: ShardingPlan) -> None:
    """`PlanError` if there is no program in which operators have shares of their own, whatever these are."""
    try:
        size_generic_step(
            flow_of(planner, plan), planner.resharder, planner.mesh.names, DEVICE, planner.constraints.shared
        )
    except RuleError as error:
        raise PlanError(f"an operator can't be in such shares: {error}") from error


def plan_with_shares(planner: Planner, capture_seconds: float, target: Target) -> ShardingPlan:
    """What a planner decides, with the seconds of the rank that is done last with its share of the batch.

    Args:
        planner: made with these options.
        capture_seconds: that the capture of the graph took.
        options: with settled shares.
    """
    plan = run_planner(planner, capture_seconds, target)
    if not target.cluster.stretches or not isinstance(target.shares, Mapping):
        return plan  # with equal devices, the rank with the largest share is what the planner's prices are for
    ((name, counts),) = target.shares.items()
    most: dict[Device, int] = {}
    for device, count in zip(
        devices_along(target.cluster, planner.mesh, planner.mesh.index(name)), counts, strict=True
    ):
        most[device] = max(most.get(device, 0), count)
    seconds, equal = _seconds_on(planner, plan), sum(counts) / len(counts)
    return replace(plan, step_seconds=max(seconds(device, count / equal)[0] for device, count in most.items()))


def speeds_of(planner: Planner, plan: ShardingPlan, devices: Sequence[Device]) -> dict[Device, float]:
    """Of every kind of device, by the seconds in which it would compute what each device has to by a plan.

    Whale compares devices by their rate in single precision; what waits for memory differs less, halves more.
    """
    seconds = _seconds_on(planner, plan)
    runs = {device: seconds(device, 1.0) for device in dict.fromkeys(devices)}
    return {device: 1.0 / (taken - exposed or 1.0) for device, (taken, exposed) in runs.items()}


def _seconds_on(planner: Planner, plan: ShardingPlan) -> Callable[[Device, float], tuple[float, float]]:
    """How long a plan's step takes on such devices with so many times an equal share, and what of it is exposed."""
    flow = flow_of(planner, plan)
    program = planner.program(flow, planner.settings.left_unreduced)
    cluster, shared = planner.cluster.first(planner.mesh.size), planner.constraints.shared

    def seconds(device: Device, share: float) -> tuple[float, float]:
        return planner.replay(program, SharePrices(flow, replace(cluster, device=device), shared, share))

    return seconds


def heterogeneous_axis(cluster: Cluster, mesh: MeshShape) -> int | None:
    """The first mesh axis whose ranks do not all have the same devices; None where there is none."""
    if cluster.is_uniform:
        return None
    unlike = (axis for axis in range(mesh.ndim) if len(set(devices_along(cluster, mesh, axis))) > 1)
    return next(unlike, None)


def devices_along(cluster: Cluster, mesh: MeshShape, axis: int) -> list[Device]:
    """For every rank along an axis what all devices there keep: groups over other axes go at their slowest's pace."""
    members: list[list[int]] = [[] for _ in range(mesh.sizes[axis])]
    for rank, coordinate in enumerate(mesh.coordinates()):
        members[coordinate[axis]].append(rank)
    return [cluster.slowest(ranks) for ranks in members]


def _memory_by_rows(memory: Memory, equal: float) -> Callable[[int], float]:
    """Bytes of a rank with so many rows, by a plan's account of equal shares.

    More rows than equal ones: what is held besides parameters, gradients and optimizer state grows with them, wherever
    most of it is. Fewer: what is held of it at the moment of the peak shrinks.
    """
    moving = memory.peak - sum(memory.held.get(kind, 0) for kind in _PERSISTENT_KINDS)

    def bytes_with(count: int) -> float:
        return memory.peak + (count / equal - 1) * (memory.activations if count > equal else moving)

    return bytes_with
