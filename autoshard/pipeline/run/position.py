"""Where a rank stands in a pipeline: its stage's mesh, and whom it sends to and receives from."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePosition:
    """What a process needs to know of its place in a pipeline.

    Attributes:
        rank: its pipeline rank.
        mesh: of the stages there.
        group: one process of every pipeline rank, in order, this one among them: what it receives comes from these.
        line: all processes along the pipeline's axis.
        sends: for the pipeline rank before this one (-1) and that behind it (1), the global ranks of those processes
            there that receive what this one sends; empty where they are those in `group`.
        starts: for every pipeline rank, the place of its first process in `line`.
    """

    rank: int
    mesh: DeviceMesh
    group: dist.ProcessGroup
    axis_group: dist.ProcessGroup
    sends: dict[int, tuple[int, ...]]
    starts: tuple[int, ...]


def pipeline_position(device_mesh: DeviceMesh, layout: PipelineMesh) -> PipelinePosition:
    """The place of this process; all processes of the mesh call this together, since groups are made here.

    Where pipeline ranks have several devices of the axis each, and perhaps unequal numbers, every process receives from
    one on the rank before and one on the rank behind, in turn, and sends to those that receive from it.

    Source: Rhino 6.3: communicators are made once, in the same order on every rank.
    """
    line = device_mesh.get_group(layout.axis)
    place = device_mesh.get_local_rank(layout.axis)
    rank = layout.rank_at(place)
    if max(layout.devices) == 1:
        return PipelinePosition(rank, _mesh_of_other_axes(device_mesh, layout), line, line, {}, layout.starts)
    mesh = _rank_mesh(device_mesh, layout, rank)
    group = _column_group(device_mesh, layout)
    own = place - layout.starts[rank]
    everyone = dist.get_process_group_ranks(line)
    sends = {
        step: tuple(
            everyone[layout.starts[rank + step] + other]
            for other in range(layout.devices[rank + step])
            if other % layout.devices[rank] == own
        )
        for step in (-1, 1)
        if 0 <= rank + step < layout.ranks
    }
    return PipelinePosition(rank, mesh, group, line, sends, layout.starts)


def _mesh_of_other_axes(device_mesh: DeviceMesh, layout: PipelineMesh) -> DeviceMesh:
    """The mesh of a stage: the axes besides the pipeline's at this rank's place on that, or this rank alone."""
    others = tuple(one.name for one in layout.whole.axes if one.name != layout.axis)
    if others:
        return device_mesh[others]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(alone, device_mesh.device_type, mesh_dim_names=layout.stage(0).names)


def _rank_mesh(device_mesh: DeviceMesh, layout: PipelineMesh, rank: int) -> DeviceMesh:
    """The mesh of the stages on this process's pipeline rank."""
    start, count = layout.starts[rank], layout.devices[rank]
    line = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    own = dist.new_group(line[start : start + count], use_local_synchronization=True)
    names = layout.stage(rank).names
    others = tuple(name for name in names if name in layout.whole.names)
    if count == 1:
        if others:
            return device_mesh[others]
        return DeviceMesh.from_group(own, device_mesh.device_type, mesh_dim_names=names)
    groups = [own if name == layout.axis else device_mesh.get_group(name) for name in names]
    ranks = device_mesh.mesh.narrow(layout.whole.index(layout.axis), start, count)
    return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _column_group(device_mesh: DeviceMesh, layout: PipelineMesh) -> dist.ProcessGroup:
    """The group of this process with those that it receives from, one of every other pipeline rank.

    The n-th process of a pipeline rank is in the n-th group, which has of ranks with fewer processes one in turn. Torch
    names a group after its ranks and how many groups the process has: who is not in one makes one of its own.
    """
    line = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    me = dist.get_rank()
    found: list[dist.ProcessGroup] = []
    for turn in range(max(layout.devices)):
        members = [line[start + turn % count] for start, count in zip(layout.starts, layout.devices, strict=True)]
        mine = members if me in members else [me]
        group = dist.new_group(mine, use_local_synchronization=True, sort_ranks=False)
        found += [group] if me in members else []
    return found[0]
