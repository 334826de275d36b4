"""The devices of a pipeline's stages: checks of the pipeline's axis and options, clusters and targets of stages."""

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
from autoshard.options.target import Target
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape


def check_axis(mesh: MeshShape, axis: str) -> None:
    """Raise `MeshError` unless the mesh has an axis of that name with two ranks or more."""
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
    """Return a cluster of equal devices for the ranks of one stage, which need not be neighbours.

    Measured collectives have the strides of the stage's own mesh.
    """
    place = mesh.index(axis)
    inner = math.prod(mesh.sizes[place + 1 :])
    size, block = mesh.sizes[place], cluster.devices_per_host
    runs: set[int] = set()
    for stage in range(size):
        ranks = [rank for rank in range(mesh.size) if rank // inner % size == stage]
        hosts = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // block)]
        runs.update(hosts if len(hosts) > 1 else ())
    # Of every host, a stage has the devices that lie together there. Where that differs from host to host, the greatest
    # common divisor makes no link faster than it is.
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
    """Return a cluster of equal devices: the slowest of the first `devices`, which has speed 1."""
    return replace(cluster.first(devices), stretches=())


def stage_clusters(cluster: Cluster, mesh: PipelineMesh) -> tuple[Cluster, ...]:
    """Return for every rank of a pipeline the cluster of its devices: of their kind, with their memory."""
    if not cluster.stretches and max(mesh.devices) == 1:
        return (stage_cluster(cluster, mesh.whole, mesh.axis),) * mesh.ranks
    whole = cluster.first(mesh.whole.size)
    return tuple(whole.of_ranks(mesh.members(rank)) for rank in range(mesh.ranks))


def forward_fingerprint(exported: ExportedModule) -> str:
    """Return a hash of a forward graph that is the same on all ranks and in all runs."""
    return fingerprint(exported.forward.inputs, (), exported.graph)


def check_pipeline_options(target: Target) -> None:
    """Raise `PlanError` if a pipeline can not have an option."""
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
    """Return the target with which one stage is planned and run.

    Args:
        target: of the whole model.
        cluster: of the stage's ranks (`stage_clusters`).
        plan: of the stage, if it is planned: its placements of inputs and outputs hold.
        names: of the stage's inputs in the calls that it will run, which may be fewer than it was planned for.
        dynamic: the dims of these inputs that are dynamic sizes, where its ranks take unequal shares.
    """
    # Hints are resolved in the whole model; there they pin the parameters of stages.
    stage = replace(
        target,
        cluster=cluster,
        hints=None,
        inputs="global",
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
