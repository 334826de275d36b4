"""The ranks of every stage of a pipeline, and of its replicas, on devices of different memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.errors import PipelineError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.assign.stage_problem import StageDevice

Together = Literal["auto", "model", "stage"]

StageRanks = tuple[tuple[tuple[int, ...], ...], ...]
"""The ranks of every replica of every stage."""


def place_stages(
    cluster: Cluster, devices: int, requested: Sequence[int], *, together: Together = "auto"
) -> StageRanks:
    """Lay the stages of a pipeline over ranks, with as many replicas as there are devices for.

    Args:
        cluster: whose first `devices` ranks are used.
        devices: a multiple of the devices of all stages; the multiple is the number of replicas (nested data
            parallelism).
        requested: devices of every stage.
        together: `"model"`: all stages of one replica on consecutive ranks, so that messages between stages stay inside
            a host as far as possible, and gradients cross hosts; `"stage"`: all replicas of one stage on consecutive
            ranks, the other way round; `"auto"`: `"model"` on equal devices, else `"stage"`, which gives all replicas
            of a stage the same kind of device where there are enough of it.

    Returns:
        The ranks of every replica of every stage. Where all stages have equally many devices, the nested tuples are a
        mesh of the axes stage, replica, device.

    Raises:
        PipelineError: `devices` is no such multiple, or a stage has none.
        MeshError: the cluster has fewer devices.

    Source: Whale 3.1.2 and 3.2.1, nested data parallelism and virtual devices; 3.3.2, the order by memory.
    """
    if not requested or min(requested) < 1:
        raise PipelineError(f"stages ask for {list(requested)} devices: each asks for one at least.")
    whole = sum(requested)
    if devices < whole or devices % whole:
        raise PipelineError(
            f"{devices} devices are no multiple of the {whole} that the stages ask for "
            f"({' + '.join(map(str, requested))}): use {devices // whole * whole or whole} of them, or ask for others."
        )
    # In both orders, devices with more memory go to earlier stages, which hold more microbatches at once.
    chosen = cluster.first(devices)
    replicas = devices // whole
    if together == "model" or (together == "auto" and chosen.is_uniform):
        models = [range(replica * whole, (replica + 1) * whole) for replica in range(replicas)]
        parts = [_split_ranks(sort_by_memory(chosen, ranks), requested) for ranks in models]
        return tuple(zip(*parts, strict=True))
    stages = _split_ranks(sort_by_memory(chosen, range(devices)), [replicas * count for count in requested])
    return tuple(_split_ranks(ranks, [len(ranks) // replicas] * replicas) for ranks in stages)


def sort_by_memory(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return ranks from the largest memory to the smallest; equal ones keep their order."""
    return tuple(sorted(ranks, key=lambda rank: -cluster.device_of(rank).memory))


def _split_ranks(ranks: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return consecutive parts with these numbers of ranks."""
    starts = [sum(counts[:place]) for place in range(len(counts))]
    return tuple(tuple(ranks[start : start + count]) for start, count in zip(starts, counts, strict=True))


def stage_devices(
    cluster: Cluster,
    mesh: PipelineMesh,
    *,
    ranks: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[StageDevice, ...]:
    """Return the device that `assign_stages` assumes for every stage.

    Args:
        cluster: the devices.
        mesh: of the pipeline, whose ranks are stages.
        ranks: the cluster's rank at every place of the mesh, in row-major order; by default, they are equal.
        dtype: of the operations by which speeds are compared.

    Returns:
        For every stage: the memory of its smallest device, in bytes; the speed of its slowest device, relative to the
        slowest one of the mesh, for which a `CostModel` of the whole mesh prices; the bandwidth of the slowest link to
        the next stage.

    Raises:
        MeshError: the cluster has fewer devices.

    Source: Whale 3.3.2: work in proportion to speed, under the memory of every device.
    """
    places = range(mesh.whole.size) if ranks is None else ranks
    reference = cluster.slowest(places).peak(dtype)
    stages = [[places[member] for member in mesh.members(rank)] for rank in range(mesh.ranks)]
    devices = []
    for stage, members in enumerate(stages):
        following = stages[stage + 1] if stage + 1 < len(stages) else []
        slowest = cluster.slowest(members)
        links = [cluster.link(source, target).bandwidth for source, target in zip(members, following, strict=False)]
        devices.append(StageDevice(min(links, default=math.inf), slowest.peak(dtype) / reference, slowest.memory))
    return tuple(devices)
