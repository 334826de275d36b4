"""Where a pipeline's stages lie: the mesh of one stage, the cluster as that mesh sees it, and the graph that is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from dataclasses import replace

from autoshard.capture.dynamic import Dynamic
from autoshard.capture.joint_graph import fingerprint
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.measurements import Grouping
from autoshard.errors import MeshError, PlanError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.planner.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape


def check_axis(mesh: MeshShape, axis: str) -> None:
    """`MeshError` unless the mesh has an axis of that name, with two ranks or more."""
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
    """The cluster, of equal devices, as the ranks of one stage see it, which need not be neighbours.

    Of every host, a stage has as many devices as lie together there; where that differs from host to host, so many as
    divide all of these numbers, so that no link is taken for a faster one than it is. Measured collectives are found
    under the strides that the stage's own mesh has.
    """
    place = mesh.index(axis)
    inner = math.prod(mesh.sizes[place + 1 :])
    size, block = mesh.sizes[place], cluster.devices_per_host
    runs: set[int] = set()
    for stage in range(size):
        ranks = [rank for rank in range(mesh.size) if rank // inner % size == stage]
        hosts = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // block)]
        runs.update(hosts if len(hosts) > 1 else ())
    per_host = math.gcd(*runs) if runs else max(block, mesh.size)
    measured = cluster.measured
    if measured is not None:
        collectives = {}
        for (kind, grouping), curve in measured.collectives.items():
            if grouping.stride < inner:
                collectives[kind, grouping] = curve
            elif grouping.stride >= inner * size:  # an axis outside the pipeline's
                collectives[kind, Grouping(grouping.size, grouping.stride // size)] = curve
        measured = replace(measured, collectives=collectives)
    return replace(cluster, devices_per_host=per_host, measured=measured)


def slowest_cluster(cluster: Cluster, devices: int) -> Cluster:
    """A cluster of equal devices: each is the slowest of the first so many, whose prices are those at speed 1."""
    return replace(cluster.first(devices), stretches=())


def stage_clusters(cluster: Cluster, mesh: PipelineMesh) -> tuple[Cluster, ...]:
    """For every rank of a pipeline, the cluster as the devices there see it: of their kind, with their memory."""
    if not cluster.stretches and max(mesh.devices) == 1:
        return (stage_cluster(cluster, mesh.whole, mesh.axis),) * mesh.ranks
    whole = cluster.first(mesh.whole.size)
    return tuple(whole.of_ranks(mesh.members(rank)) for rank in range(mesh.ranks))


def forward_fingerprint(exported: ExportedModule) -> str:
    """A hash that tells forward graphs apart, the same on all ranks and in all runs."""
    return fingerprint(exported.forward.inputs, (), exported.graph)


def check_pipeline_options(target: Target) -> None:
    """`PlanError` if an option is one that a pipeline can not have."""
    refused = {
        "dynamic": target.dynamic is not None and "the sizes of what stages send each other are fixed",
        "inputs": target.inputs != "global" and "every rank is given the whole batch",
        "output_placements": target.output_placements is not None and "outputs are put together of microbatches",
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
    """The options that one stage is planned with, and run with.

    Args:
        options: as the user gave them for the whole model; hints are resolved there, and pin what a stage holds.
        cluster: as the stage's ranks see it (`stage_clusters`).
        plan: of the stage, once there is one: what it says of inputs and outputs holds.
        names: of what the stage takes in the calls that it is to run, which may be less than it was planned for.
        dynamic: the dims of these that are dynamic sizes, where its ranks take shares of their own.
    """
    free: dict[str, object] = {
        "hints": None,
        "inputs": "global",
        "input_placements": {},
        "output_placements": None,
        "shares": None,
    }
    mine = replace(target, cluster=cluster, **free)  # type: ignore[arg-type]
    if plan is None:
        return mine
    if plan.shares:
        mine = replace(mine, shares=plan.shares, dynamic=dynamic)
    if plan.options.get("inputs") == "local":
        known = {name: row for name, row in plan.input_placements.items() if name in names}
        mine = replace(mine, inputs="local", input_placements=known)
    parted = any(not one.is_replicate() for row in plan.output_placements.values() for one in row)
    return replace(mine, output_placements=plan.output_placements) if parted else mine
