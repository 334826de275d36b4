"""Shares of the batch in proportion to the speed of devices, if they make the step shorter (Whale, 3.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoshard.capture import outside_modes
from autoshard.capture.fake_module import DEVICE
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.worker_shares import Worker, equal_share_device, shares
from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.memory.footprint import Memory
from autoshard.options.target import Target
from autoshard.planner.captured_call import CapturedCall
from autoshard.planner.planner import Planner
from autoshard.planner.planning import run_planner
from autoshard.planner.schedule import SharePrices
from autoshard.planner.target_constraints import batch_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.size_generic import size_generic_step
from autoshard.specs.axes import MeshShape

_PERSISTENT_KINDS = ("parameter", "gradient", "optimizer", "buffer")  # memory that does not depend on the batch

PlanAndPlanner = tuple[ShardingPlan, Planner]


def with_shares(target: Target, mesh: MeshShape, given: Mapping[str, Sequence[int]]) -> Target:
    """Return a target with these shares, at the prices of a device whose equal share takes as long as the slowest one.

    Args:
        target: the options of the user.
        mesh: the mesh axes.
        given: for one mesh axis by name, the shares of its ranks; empty for equal shares. A single rank takes all.

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


def plan_batch_shares(call: CapturedCall) -> ShardingPlan:
    """Return the faster one of two plans: of equal shares of the batch, and of shares in proportion to speed.

    The second is made if devices along some axis of the mesh differ, and the ranks of the axis can take shares: the
    batch is a dynamic size, inputs are global, and outputs come back whole. If memory is short, shares move to ranks
    with more of it. Shares stay equal if there is no room for others, a rank would get no rows, or an operator needs
    equal ones.

    Raises:
        AutoshardError: as for `autoshard.plan`.

    Source: Whale 3.3.1, Formula 1 and Algorithm 1.
    """
    graph, mesh, target = call.graph, call.mesh, call.target

    def plan_counts(given: Mapping[str, Sequence[int]]) -> PlanAndPlanner:
        return plan_with_shares(call, with_shares(target, mesh, given))

    equal = plan_counts({})
    axis = heterogeneous_axis(target.cluster, mesh)
    batch = None if graph.dynamic is None else batch_of(graph)
    if axis is None or batch is None or target.inputs == "local" or target.output_placements is not None:
        return equal[0]
    assert graph.dynamic is not None
    total = int(graph.dynamic.example[batch])
    return faster_plan(call, equal, axis, total, lambda counts: plan_counts({mesh.names[axis]: counts}))


def faster_plan(
    call: CapturedCall,
    equal: PlanAndPlanner,
    axis: int,
    total: int,
    plan_counts: Callable[[Sequence[int]], PlanAndPlanner],
) -> ShardingPlan:
    """Return the faster one of a plan of equal shares, and of shares in proportion to speed as memory allows.

    Args:
        call: the call that is planned.
        equal: the plan of equal shares, and its planner.
        axis: the mesh axis along which devices differ.
        total: the sum of all shares.
        plan_counts: makes a plan, and its planner, given the share of every rank along the axis.
    """
    equal_plan, equal_planner = equal
    limit = call.target.settings.memory_limit
    devices = devices_along(call.target.cluster, call.mesh, axis)
    speeds = speeds_of(equal_planner, equal_plan, devices)
    workers = [Worker(speeds[device], min(device.memory, limit or device.memory)) for device in devices]
    counts = shares(total, [replace(worker, memory=float("inf")) for worker in workers], lambda _: 0)
    try:
        # By speed alone, and once more if that is too much for the memory of a device.
        for _ in range(2):
            if min(counts) < 1 or len(set(counts)) == 1:
                return equal_plan
            uneven, planner = plan_counts(counts)
            memory_of = _memory_by_rows(uneven.memory, total / len(workers))
            before, counts = counts, shares(total, workers, memory_of)
            # The shares fit the memory of every rank.
            if counts == before:
                # The plan's memory is that of equal shares; the rank with the least room says how much more fits.
                room = min(worker.memory - memory_of(count) for worker, count in zip(workers, counts, strict=True))
                uneven = replace(uneven, device_memory=int(uneven.memory.peak + room))
                if uneven.step_seconds < equal_plan.step_seconds:
                    check_program(planner, uneven)
                    return uneven
    except (BudgetError, PlanError):
        # There is no room for other shares, or an operator needs equal ones.
        pass
    return equal_plan


def check_program(planner: Planner, plan: ShardingPlan) -> None:
    """Raise a `PlanError` if there is no program in which operators have unequal shares, whatever these are."""
    flow, shared = planner.flow_of(plan), planner.constraints.shared
    try:
        with outside_modes():
            size_generic_step(flow, planner.resharder, planner.mesh.names, DEVICE, shared)
    except RuleError as error:
        raise PlanError(f"an operator can't be in such shares: {error}") from error


def plan_with_shares(call: CapturedCall, target: Target, graph: JointGraph | None = None) -> PlanAndPlanner:
    """Return a plan, with the step seconds of the rank that ends last with its share, and its planner.

    Args:
        call: the call that is planned.
        target: the target; its shares are counts, or None.
        graph: the graph with dims in equal parts, in place of the captured one.
    """
    planner = call.planner_of(target, graph)
    plan = run_planner(planner, call.seconds, target)
    if not target.cluster.stretches or not isinstance(target.shares, Mapping):
        # The planner's prices are those of the largest share: with equal devices, no rank ends later.
        return plan, planner
    ((name, counts),) = target.shares.items()
    most: dict[Device, int] = {}
    for device, count in zip(devices_along(target.cluster, call.mesh, call.mesh.index(name)), counts, strict=True):
        most[device] = max(most.get(device, 0), count)
    seconds, equal = _seconds_on(planner, plan), sum(counts) / len(counts)
    step_seconds = max(seconds(device, count / equal)[0] for device, count in most.items())
    return replace(plan, step_seconds=step_seconds), planner


def speeds_of(planner: Planner, plan: ShardingPlan, devices: Sequence[Device]) -> dict[Device, float]:
    """Return the speed of every kind of device: the inverse of its compute seconds by a plan.

    Whale compares devices by their rate in single precision. In operators that wait for memory devices differ less, in
    half precision more.
    """
    seconds = _seconds_on(planner, plan)
    runs = {device: seconds(device, 1.0) for device in dict.fromkeys(devices)}
    return {device: 1.0 / (total - exposed or 1.0) for device, (total, exposed) in runs.items()}


def _seconds_on(planner: Planner, plan: ShardingPlan) -> Callable[[Device, float], tuple[float, float]]:
    """Return a function of a device and a multiple of an equal share: its step's seconds, and those exposed."""
    flow = planner.flow_of(plan)
    program = planner.program(flow, planner.settings.left_unreduced)
    cluster, shared = planner.cluster.first(planner.mesh.size), planner.constraints.shared

    def seconds(device: Device, share: float) -> tuple[float, float]:
        return planner.replay(program, SharePrices(flow, replace(cluster, device=device), shared, share))

    return seconds


def heterogeneous_axis(cluster: Cluster, mesh: MeshShape) -> int | None:
    """Return the first mesh axis whose ranks have different devices; None if there is no such axis."""
    if cluster.is_uniform:
        return None
    unlike = (axis for axis in range(mesh.ndim) if len(set(devices_along(cluster, mesh, axis))) > 1)
    return next(unlike, None)


def devices_along(cluster: Cluster, mesh: MeshShape, axis: int) -> list[Device]:
    """Return the slowest device of every rank along an axis: groups over other axes go at its pace."""
    members: list[list[int]] = [[] for _ in range(mesh.sizes[axis])]
    for rank, coordinate in enumerate(mesh.coordinates()):
        members[coordinate[axis]].append(rank)
    return [cluster.slowest(ranks) for ranks in members]


def _memory_by_rows(memory: Memory, equal: float) -> Callable[[int], float]:
    """Return a function of a rank's rows: its bytes, by a plan's account of equal shares.

    With more rows, the largest amount of activations grows. With fewer, the activations at the peak's moment shrink.
    """
    moving = memory.peak - sum(memory.held.get(kind, 0) for kind in _PERSISTENT_KINDS)

    def bytes_with(count: int) -> float:
        return memory.peak + (count / equal - 1) * (memory.activations if count > equal else moving)

    return bytes_with
