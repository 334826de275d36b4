"""Shares of the batch, or of other dims that a plan splits along an axis, for devices of different kinds.

`plan_shares` makes the plan of a call: with the shares that a user asks for, or, if devices differ, in proportion to
their speed if that makes the step shorter (Whale, 3.3.1).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.capture import outside_modes
from autoshard.capture.capture_device import DEVICE
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.worker_shares import Worker, equal_share_device, shares
from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.memory.footprint import Memory
from autoshard.options.target import Target
from autoshard.patterns.parts import Loop, unequal_loops
from autoshard.planner.account import SharePrices
from autoshard.planner.layouts.layout_planner import plan_no_slower_than_layouts
from autoshard.planner.planner import Planner
from autoshard.planner.planning import CapturedCall, explorer_for
from autoshard.planner.target_constraints import batch_of, leaves_outputs
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.build_program import size_generic_step
from autoshard.specs.axes import MeshShape

_PERSISTENT_KINDS = ("parameter", "gradient", "optimizer", "buffer")  # memory that does not depend on the batch

_MAX_TOTALS = 2  # numbers of parts to try; each is planned once or twice

PlanAndPlanner = tuple[ShardingPlan, Planner]


def plan_shares(call: CapturedCall) -> ShardingPlan:
    """Return a plan with the requested shares: of the batch of dynamic inputs, or of other dims.

    If no dim can be divided into the requested parts, a later call of a module gets equal parts; the first call raises
    an error.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    mesh, target = call.mesh, call.target
    if target.shares == "auto":
        axis = heterogeneous_axis(target.cluster, mesh)
        if target.dynamic or target.inputs == "local" or axis is None:
            return plan_batch_shares(call)
        return UnequalParts(call, axis).plan_proportional()
    shares = target.shares or {}
    shared_target = with_shares(target, mesh, shares)
    # With static sizes, shares are of the dims that a plan splits. A single rank takes all.
    if target.dynamic or not isinstance(shared_target.shares, Mapping):
        return plan_with_shares(call, shared_target)[0]
    if target.inputs == "local":
        raise PlanError('shares of what is not the batch are for inputs="global", which every rank passes whole.')
    ((axis_name, counts),) = shared_target.shares.items()
    try:
        planned = UnequalParts(call, mesh.index(axis_name)).plan_counts(counts)
        if planned is not None:
            return planned[0]
        raise PlanError(
            f"shares of axis {axis_name!r} are {list(counts)}, and no dim that is split along it can be divided in "
            f"{part_count(counts)} equal parts. Choose shares that add up to a divisor of such dims, or, for shares of "
            'the batch of any size, say which dims of the inputs are the batch: dynamic={"x": {0: "batch"}}.'
        )
    except PlanError:
        # A later call must run with the parameters as placed, which it can with equal parts.
        if call.placed is None:
            raise
    return plan_with_shares(call, with_shares(target, mesh, {}))[0]


def plan_batch_shares(call: CapturedCall) -> ShardingPlan:
    """Return the faster of two plans: with equal shares of the batch, and with shares in proportion to speed.

    The second is made if devices along some mesh axis differ, and the ranks of the axis can take shares: the batch is a
    dynamic size, inputs are global, and outputs are returned whole. If memory is short, shares move to ranks with more
    of it. Shares are equal if there is no room for others, a rank would get no rows, or an operator needs equal ones.

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
    if axis is None or batch is None or target.inputs == "local" or not _returns_whole_outputs(call):
        return equal[0]
    assert graph.dynamic is not None
    total = int(graph.dynamic.example[batch])
    return faster_plan(call, equal, axis, total, lambda counts: plan_counts({mesh.names[axis]: counts}))


def _returns_whole_outputs(call: CapturedCall) -> bool:
    asked = call.target.output_placements
    return asked is None or (asked == "auto" and not leaves_outputs(call.graph, call.target))


def faster_plan(
    call: CapturedCall,
    equal: PlanAndPlanner,
    axis: int,
    total: int,
    plan_counts: Callable[[Sequence[int]], PlanAndPlanner],
) -> ShardingPlan:
    """Return the faster of two plans: with equal shares, and with shares in proportion to speed as memory allows.

    Args:
        call: the planned call.
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
    # First only by speed: the memory of a share is known only from a plan with shares.
    counts = shares(total, [replace(worker, memory=float("inf")) for worker in workers], lambda _: 0)
    try:
        # Again if that is too much for the memory of a device.
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
        # No room for other shares, or an operator that needs equal ones.
        pass
    return equal_plan


def check_program(planner: Planner, plan: ShardingPlan) -> None:
    """Raise a `PlanError` if no program exists for unequal shares, whatever these are."""
    flow, shared = planner.flow_of(plan), planner.constraints.shared
    try:
        with outside_modes():
            size_generic_step(flow, planner.resharder, planner.mesh.names, DEVICE, shared)
    except RuleError as error:
        raise PlanError(f"an operator can't be in such shares: {error}") from error


def plan_with_shares(call: CapturedCall, target: Target, graph: JointGraph | None = None) -> PlanAndPlanner:
    """Return a plan, with the step seconds of the slowest rank given its share, and its planner.

    Args:
        call: the planned call.
        target: the target; its shares are counts, or None.
        graph: the graph with dims in equal parts, instead of the captured one.
    """
    planner = call.planner_of(target, graph)
    plan = plan_no_slower_than_layouts(call, planner, target)
    if not target.cluster.stretches or not isinstance(target.shares, Mapping):
        # The planner's prices are those of the largest share, which is the slowest if devices are equal.
        return plan, planner
    ((name, counts),) = target.shares.items()
    # The slowest rank of each kind of device is the one with the largest share.
    most: dict[Device, int] = {}
    for device, count in zip(devices_along(target.cluster, call.mesh, call.mesh.index(name)), counts, strict=True):
        most[device] = max(most.get(device, 0), count)
    seconds, equal = _seconds_on(planner, plan), sum(counts) / len(counts)
    step_seconds = max(seconds(device, count / equal)[0] for device, count in most.items())
    return replace(plan, step_seconds=step_seconds + plan.host_update_seconds), planner


def speeds_of(planner: Planner, plan: ShardingPlan, devices: Sequence[Device]) -> dict[Device, float]:
    """Return the speed of every kind of device: the inverse of its compute seconds in a plan.

    Whale compares devices by their rate in single precision. Devices differ less in operators bound by memory, and more
    in half precision.
    """
    seconds = _seconds_on(planner, plan)
    runs = {device: seconds(device, 1.0) for device in dict.fromkeys(devices)}
    return {device: 1.0 / (total - exposed or 1.0) for device, (total, exposed) in runs.items()}


def _seconds_on(planner: Planner, plan: ShardingPlan) -> Callable[[Device, float], tuple[float, float]]:
    """Return a function of a device and a multiple of an equal share: its step seconds, and the exposed ones."""
    flow = planner.flow_of(plan)
    program = planner.program(flow, planner.settings.left_unreduced)
    cluster, shared = planner.cluster.first(planner.mesh.size), planner.constraints.shared

    def seconds(device: Device, share: float) -> tuple[float, float]:
        step = planner.replay(program, SharePrices(flow, replace(cluster, device=device), shared, share))
        return step.seconds, step.exposed

    return seconds


def heterogeneous_axis(cluster: Cluster, mesh: MeshShape) -> int | None:
    """Return the first mesh axis whose ranks have different devices; None if there is no such axis."""
    if cluster.is_uniform:
        return None
    unlike = (axis for axis in range(mesh.ndim) if len(set(devices_along(cluster, mesh, axis))) > 1)
    return next(unlike, None)


def devices_along(cluster: Cluster, mesh: MeshShape, axis: int) -> list[Device]:
    """Return the slowest device of every rank along an axis, which sets the pace of groups over other axes."""
    members: list[list[int]] = [[] for _ in range(mesh.sizes[axis])]
    for rank, coordinate in enumerate(mesh.coordinates()):
        members[coordinate[axis]].append(rank)
    return [cluster.slowest(ranks) for ranks in members]


def _memory_by_rows(memory: Memory, equal: float) -> Callable[[int], float]:
    """Return a function that estimates a rank's peak bytes for a number of rows, scaled from a plan with equal shares.

    With more rows, the largest amount of activations grows. With fewer rows, the activations at the peak shrink.
    """
    moving = memory.peak - sum(memory.held.get(kind, 0) for kind in _PERSISTENT_KINDS)
    return lambda count: memory.peak + (count / equal - 1) * (memory.activations if count > equal else moving)


@dataclass(frozen=True)
class UnequalParts:
    """Plans in which the ranks of an axis hold unequal parts of the dims that a plan of equal parts splits along it.

    Parameters are replicated on that axis, since no `DTensor` has such parts; a rank computes with its part of them.

    Attributes:
        call: the planned call, with static sizes. Parameters that were placed before keep their placement.
        axis: the mesh axis.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    call: CapturedCall
    axis: int

    @cached_property
    def equal_plan(self) -> PlanAndPlanner:
        """The plan of equal parts, and its planner."""
        return plan_with_shares(self.call, with_shares(self.call.target, self.call.mesh, {}))

    @cached_property
    def split_loops(self) -> dict[Loop, int]:
        """The sizes of the loops that the plan of equal parts splits along the axis and that can be split unequally."""
        return self._loops_split_by(self.equal_plan)

    @cached_property
    def split_loops_in_least_memory(self) -> dict[Loop, int]:
        """The same for the plan of equal parts with the smallest peak, whatever the limit."""
        planner = self.call.planner_of(with_shares(self.call.target, self.call.mesh, {}))
        return self._loops_split_by((explorer_for(planner).leanest(), planner))

    def _loops_split_by(self, equal: PlanAndPlanner) -> dict[Loop, int]:
        plan, planner = equal
        return unequal_loops(planner.flow_of(plan), self.axis, self.call.placed or ())

    def plan_counts(self, counts: Sequence[int]) -> PlanAndPlanner | None:
        """Return a plan in which ranks take parts in proportion to `counts`; None if no dim can be so divided.

        Raises:
            AutoshardError: there is no such plan.
        """
        try:
            return self.plan_loops(self.split_loops, counts)
        except BudgetError:
            # Equal parts need less memory, since parameters are sharded. The loops of the smallest peak do not depend
            # on the limit.
            planned = self.plan_loops(self.split_loops_in_least_memory, counts)
            if planned is None:
                raise
            return planned

    def plan_loops(self, split: Mapping[Loop, int], counts: Sequence[int]) -> PlanAndPlanner | None:
        """Return a plan in which ranks take `counts` of the loops in `split`; None if no loop can be so divided.

        If a program can't have unequal shares of all the loops, only one loop is divided: the one with the shortest
        step.

        Raises:
            AutoshardError: there is no such plan with any of the loops.
        """
        loops = [loop for loop, size in split.items() if size % part_count(counts) == 0]
        try:
            return self.plan_parts(loops, counts) if loops else None
        except PlanError as error:
            alone: list[PlanAndPlanner] = []
            for loop in loops if len(loops) > 1 else ():
                with contextlib.suppress(PlanError):
                    alone.append(self.plan_parts([loop], counts))
            if not alone:
                raise error
            return min(alone, key=lambda planned: planned[0].step_seconds)

    def plan_parts(self, loops: Sequence[Loop], counts: Sequence[int]) -> PlanAndPlanner:
        """Return a plan in which ranks take `counts` of every one of these loops.

        Raises:
            PlanError: an operator needs equal parts.
        """
        mesh = self.call.mesh
        shared_target = with_shares(self.call.target, mesh, {mesh.names[self.axis]: counts})
        try:
            graph = self.call.graph_in_parts(loops, part_count(counts))
            self.call.planner_of(shared_target, graph)
        except RuleError as error:
            # An argument of an operator is the former size of a dim, such as a number of groups.
            raise PlanError(f"an operator can't be in such parts: {error}") from error
        plan, planner = plan_with_shares(self.call, shared_target, graph)
        plan = replace(plan, options={**plan.options, "parts": [list(loop) for loop in loops]})
        check_program(planner, plan)
        return plan, planner

    def plan_proportional(self) -> ShardingPlan:
        """Return the fastest plan with equal parts, or with parts in proportion to speed."""

        def plan_total(counts: Sequence[int]) -> PlanAndPlanner:
            planned = self.plan_loops(self.split_loops, counts)
            assert planned is not None, "shares of a total divide what the total divides"
            return planned

        plans = [self.equal_plan[0]]
        # No `DTensor` has unequal parts, so outputs must be returned whole.
        if _returns_whole_outputs(self.call):
            totals = candidate_totals(self.split_loops.values(), self.call.mesh.sizes[self.axis])
            plans += [
                faster_plan(self.call, self.equal_plan, self.axis, total, plan_total) for total in totals[:_MAX_TOTALS]
            ]
        return min(plans, key=lambda plan: plan.step_seconds)


def candidate_totals(sizes: Iterable[int], ranks: int) -> list[int]:
    """Return numbers of parts into which dims of these sizes may be divided for unequal shares of the ranks.

    The number that divides most sizes comes first. Only the largest number that divides the same sizes is returned.
    """
    sizes = list(sizes)
    common = {math.gcd(first, second) for first in sizes for second in sizes}
    largest: dict[tuple[bool, ...], int] = {}
    for total in sorted(divisor for divisor in common if divisor > ranks):
        largest[tuple(size % total == 0 for size in sizes)] = total
    return sorted(largest.values(), key=lambda total: -sum(size % total == 0 for size in sizes))


def part_count(counts: Sequence[int]) -> int:
    """Return the number of equal parts into which a dim is divided for shares in proportion to `counts`."""
    return sum(counts) // math.gcd(*counts)


def with_shares(target: Target, mesh: MeshShape, given: Mapping[str, Sequence[int]]) -> Target:
    """Return a target with these shares, priced as a device whose equal share takes as long as the slowest rank's.

    Args:
        target: the options of the user.
        mesh: the mesh axes.
        given: name of one mesh axis -> the shares of its ranks; empty for equal shares. A single rank takes all.

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
