"""The devices of a pipeline: ranks along its axis, meshes and clusters of stages, and shares of microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.capture.dynamic import Dynamic
from autoshard.capture.marks import Saving
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.measurements import Grouping
from autoshard.cluster.worker_shares import Worker, apportion, shares
from autoshard.errors import MeshError, PlanError
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep
from autoshard.pipeline.graph.stage_problem import StageDevice
from autoshard.pipeline.plan.planned_stage import PlannedStage
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.planner.shares import devices_along, heterogeneous_axis, speeds_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.localize import localize
from autoshard.specs.axes import MeshAxis, MeshShape

# The axis of a stage's mesh if the mesh has only the pipeline axis: a mesh needs at least one axis.
ALONE = MeshAxis("device", 1)


@dataclass(frozen=True, slots=True)
class PipelineMesh:
    """A mesh with a pipeline axis.

    Attributes:
        whole: all axes.
        axis: the name of the pipeline axis.
        devices: the number of consecutive positions on that axis for each pipeline rank: one, unless task graphs
            request other numbers (Whale, 3.2.1: devices are taken in order, as many as each requests).
    """

    whole: MeshShape
    axis: str
    devices: tuple[int, ...]

    @staticmethod
    def of(mesh: MeshShape, axis: str, devices: Sequence[int] = ()) -> PipelineMesh:
        """Return the pipeline along an axis; each position is a pipeline rank unless `devices` says otherwise.

        Raises:
            MeshError: the mesh has no such axis.
        """
        return PipelineMesh(mesh, axis, tuple(devices) or (1,) * mesh.sizes[mesh.index(axis)])

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks."""
        return len(self.devices)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first position of every pipeline rank along the axis."""
        return tuple(itertools.accumulate((0, *self.devices[:-1])))

    def rank_at(self, place: int) -> int:
        """Return the pipeline rank of a position along the axis."""
        return next(rank for rank in reversed(range(self.ranks)) if self.starts[rank] <= place)

    def stage(self, rank: int) -> MeshShape:
        """Return the mesh of a stage: the other axes, and the pipeline axis itself if the rank has several positions.

        A stage on a single device has a mesh with one axis of size 1.
        """
        count = self.devices[rank]
        axes = (replace(axis, size=count) if axis.name == self.axis else axis for axis in self.whole.axes)
        return MeshShape(tuple(axis for axis in axes if axis.name != self.axis or count > 1) or (ALONE,))

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the mesh ranks of a pipeline rank, in row-major order."""
        position = self.whole.index(self.axis)
        places = range(self.starts[rank], self.starts[rank] + self.devices[rank])
        return tuple(member for member, at in enumerate(self.whole.coordinates()) if at[position] in places)


def stage_devices(cluster: Cluster, mesh: PipelineMesh) -> tuple[StageDevice, ...]:
    """Return the device that `assign_stages` assumes for every pipeline rank.

    Args:
        cluster: the devices.
        mesh: the mesh of the pipeline.

    Returns:
        For every rank: the memory of its smallest device, in bytes; the float32 speed of its slowest device, relative
        to the slowest one of the mesh, to which a `CostModel` of the whole mesh applies; the bandwidth of the slowest
        link to the next rank.

    Raises:
        MeshError: the cluster has fewer devices.

    Source: Whale 3.3.2: work in proportion to speed, within the memory of every device.
    """
    reference = cluster.slowest(range(mesh.whole.size)).peak(torch.float32)
    ranks = [mesh.members(rank) for rank in range(mesh.ranks)]
    devices = []
    for members, following in itertools.zip_longest(ranks, ranks[1:], fillvalue=()):
        slowest = cluster.slowest(members)
        links = [cluster.link(source, target).bandwidth for source, target in zip(members, following, strict=False)]
        speed = slowest.peak(torch.float32) / reference
        devices.append(StageDevice(min(links, default=math.inf), speed, slowest.memory))
    return tuple(devices)


def check_axis(mesh: MeshShape, axis: str) -> None:
    """Raise `MeshError` unless the mesh has an axis with that name and at least two ranks."""
    if axis not in mesh.names:
        raise MeshError(
            f"the mesh has no axis {axis!r} for a pipeline; its axes are {mesh}. Name one of them, or add an axis."
        )
    if mesh.sizes[mesh.index(axis)] < 2:
        raise MeshError(
            f"pipeline axis {axis} of the mesh {mesh} has one rank, which is no pipeline: leave the axis out, or give "
            "it two ranks or more."
        )


def stage_cluster(cluster: Cluster, mesh: MeshShape, axis: str) -> Cluster:
    """Return a cluster of equal devices for the ranks of one stage, which need not be adjacent.

    Measured collectives get the strides of the stage's own mesh.
    """
    place = mesh.index(axis)
    inner = math.prod(mesh.sizes[place + 1 :])
    size, block = mesh.sizes[place], cluster.devices_per_host
    runs: set[int] = set()
    for stage in range(size):
        ranks = [rank for rank in range(mesh.size) if rank // inner % size == stage]
        hosts = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // block)]
        runs.update(hosts if len(hosts) > 1 else ())
    # From every host, a stage has a run of adjacent devices. If its length varies between hosts, the greatest common
    # divisor is used, with which no link is faster than in reality.
    per_host = math.gcd(*runs) if runs else max(block, mesh.size)
    measured = cluster.measured
    if measured is not None:
        collectives = {}
        for (kind, grouping), curve in measured.collectives.items():
            if grouping.stride < inner:
                collectives[kind, grouping] = curve
            # An axis outside the pipeline's: in a stage's mesh its ranks have smaller strides.
            elif grouping.stride >= inner * size:
                collectives[kind, Grouping(grouping.size, grouping.stride // size)] = curve
        measured = replace(measured, collectives=collectives)
    return replace(cluster, devices_per_host=per_host, measured=measured)


def slowest_cluster(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of equal devices: the slowest of the first `devices`, with speed 1."""
    return replace(cluster.first(devices), stretches=())


def stage_clusters(cluster: Cluster, mesh: PipelineMesh) -> tuple[Cluster, ...]:
    """Return, for every pipeline rank, the cluster of its devices, with their kind and memory."""
    if not cluster.stretches and max(mesh.devices) == 1:
        return (stage_cluster(cluster, mesh.whole, mesh.axis),) * mesh.ranks
    whole = cluster.first(mesh.whole.size)
    return tuple(whole.of_ranks(mesh.members(rank)) for rank in range(mesh.ranks))


def forward_fingerprint(step: MicrobatchStep) -> str:
    """Return a hash of a forward graph that is equal on all ranks and in all runs."""
    return step.forward_fingerprint


def check_pipeline_options(target: Target) -> None:
    """Raise `PlanError` if an option is not supported for pipelines."""
    moves = any(isinstance(value, Saving) and value.kind == "offload" for value in (target.hints or {}).values())
    refused = {
        "offload": target.settings.offload != "none" and "its stages keep their tensors on the device",
        "offload_optimizer": target.settings.offload_optimizer != "none"
        and "its stages keep their optimizer's state on the device",
        "hints of autoshard.offload()": moves and "its stages keep their tensors on the device",
        "dynamic": target.dynamic is not None and "the sizes of what stages send each other are fixed",
        "inputs": target.inputs != "global" and "every rank is given the whole batch",
        "outputs": target.outputs != "global" and "outputs are put together of microbatches",
        "output_placements": target.output_placements not in (None, "auto")
        and "outputs are put together of microbatches",
        "unread_outputs": target.options.unread_outputs and "its stages make all outputs",
    }
    for name, why in refused.items():
        if why:
            raise PlanError(f"a pipeline can not have the option {name}: {why}. Leave it out.")


def stage_target(
    target: Target,
    cluster: Cluster,
    plan: ShardingPlan | None = None,
    names: Collection[str] = (),
    dynamic: Dynamic | None = None,
) -> Target:
    """Return the target for planning and running one stage.

    Args:
        target: the target of the whole model.
        cluster: the cluster of the stage's ranks (`stage_clusters`).
        plan: the stage's plan, if it has one: its placements of inputs and outputs apply.
        names: the stage's inputs in the calls that it will run, which may be fewer than in its plan.
        dynamic: the dims of these inputs with dynamic sizes, if its ranks have unequal shares.
    """
    # Hints are resolved in the whole model, where they pin the parameters of stages. The model's inputs, outputs and
    # shares are not those of a stage.
    stage = replace(
        target,
        cluster=cluster,
        hints=None,
        inputs="global",
        outputs="global",
        input_placements={},
        output_placements=None,
        shares=None,
    )
    if plan is None:
        return stage
    if plan.shares:
        stage = replace(stage, shares=plan.shares, dynamic=dynamic)
    if plan.options.get("inputs") == "local":
        known = {name: placements for name, placements in plan.input_placements.items() if name in names}
        stage = replace(stage, inputs="local", input_placements=known)
    passes_shards = any(
        not placement.is_replicate() for placements in plan.output_placements.values() for placement in placements
    )
    return replace(stage, output_placements=plan.output_placements) if passes_shards else stage


RankShares = Mapping[str, tuple[int, ...]]
"""The name of one axis of a stage's mesh, and the samples of a microbatch per rank; empty for equal shares."""


def proportional_shares(planned: PlannedStage, cluster: Cluster, mesh: MeshShape, samples: int) -> RankShares:
    """Return shares of a microbatch in proportion to speed.

    Args:
        planned: a stage with equal shares; speeds are those for its computation.
        cluster: the cluster of the stage's ranks.
        mesh: the mesh of the stage.
        samples: the number per microbatch.

    Returns:
        The shares along the first axis whose ranks have different kinds of devices; empty if all would be equal, or a
        rank would get no sample.

    Source: Whale 3.3.1, Formula 1.
    """
    axis = heterogeneous_axis(cluster, mesh)
    if axis is None:
        return {}
    devices = devices_along(cluster, mesh, axis)
    speeds = speeds_of(planned.planner, planned.plan, devices)
    # Memory does not limit the shares here: `memory_share` accounts for it.
    counts = shares(samples, [Worker(speeds[device]) for device in devices], lambda _: 0)
    return {mesh.names[axis]: counts} if min(counts) and len(set(counts)) > 1 else {}


def memory_share(given: RankShares, cluster: Cluster, mesh: MeshShape, limit: float) -> float:
    """Return the part of a microbatch for which the smallest memory is planned, relative to an equal share.

    A plan that fits the stage's smallest memory with this part fits every device with its own share.

    Args:
        given: the shares of the ranks.
        cluster, mesh: the cluster and the mesh of the stage.
        limit: a limit in bytes for all devices.
    """
    if not given:
        return 1.0
    ((name, counts),) = given.items()
    # The memory of other devices, in proportion to their shares, must be at least that of the smallest.
    memories = [min(device.memory, limit) for device in devices_along(cluster, mesh, mesh.index(name))]
    equal = sum(counts) / len(counts)
    return max(count / equal * min(memories) / memory for count, memory in zip(counts, memories, strict=True))


def scale_to_shares(costs: StageCosts, given: RankShares, part: float) -> StageCosts:
    """Scale the costs of a stage to its ranks' shares.

    Args:
        costs: the stage's costs with equal shares; its compute seconds are those of the slowest device.
        given: the shares of the ranks.
        part: the part of a microbatch that they hold (`memory_share`).
    """
    if not given:
        return costs
    (counts,) = given.values()
    # The largest message arrives last.
    largest = max(counts) / sum(counts) * len(counts)
    return replace(
        costs,
        forward_bytes=math.ceil(costs.forward_bytes * largest),
        forward_send_seconds=costs.forward_send_seconds * largest,
        backward_bytes=math.ceil(costs.backward_bytes * largest),
        backward_send_seconds=costs.backward_send_seconds * largest,
        saved_bytes=math.ceil(costs.saved_bytes * part),
        weight_saved_bytes=math.ceil(costs.weight_saved_bytes * part),
        # Gathered parameters are included in these bytes, and do not shrink with a share.
        working_bytes=math.ceil(costs.working_bytes * max(part, 1.0)),
    )


def check_uneven_programs(planned: Iterable[PlannedStage]) -> None:
    """Raise `PlanError` if an operator of a stage cannot have unequal shares with its strategy in the plan."""
    # Stages with the same graph have the same program.
    seen: set[str] = set()
    for stage in planned:
        if stage.plan.shares and stage.plan.fingerprint not in seen:
            planner = stage.planner
            flow = planner.flow_of(stage.plan)
            localize(flow, planner.resharder, planner.mesh.names, shared=planner.constraints.shared)
            seen.add(stage.plan.fingerprint)


def has_sample_per_rank(given: RankShares, samples: int) -> bool:
    """Return True if every rank gets a sample of a microbatch with so many samples."""
    # A single sample would make the dynamic size a constant in the graph.
    return all(samples > 1 and min(apportion(samples, counts)) > 0 for counts in given.values())
