"""The position of a process in a pipeline: the mesh of its stages, and the processes that it sends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePosition:
    """The position of a process in a pipeline.

    Attributes:
        rank: its pipeline rank.
        mesh: of the stages on that rank.
        group: one process of every pipeline rank, in order, this one among them; it receives from these.
        axis_group: all processes along the pipeline's axis.
        sends: for the pipeline rank before this one (-1) and that behind it (1), the global ranks of the processes that
            this one sends to; empty where they are those in `group`.
        starts: for every pipeline rank, the position of its first process in `axis_group`.
    """

    rank: int
    mesh: DeviceMesh
    group: dist.ProcessGroup
    axis_group: dist.ProcessGroup
    sends: dict[int, tuple[int, ...]]
    starts: tuple[int, ...]


def pipeline_position(device_mesh: DeviceMesh, layout: PipelineMesh) -> PipelinePosition:
    """Return the position of this process. All processes of the mesh call this together, since groups are made here.

    Source: Rhino 6.3: communicators are made once, in the same order on every rank.
    """
    axis_group = device_mesh.get_group(layout.axis)
    place = device_mesh.get_local_rank(layout.axis)
    rank = layout.rank_at(place)
    if max(layout.devices) == 1:
        mesh = _mesh_of_other_axes(device_mesh, layout)
        return PipelinePosition(rank, mesh, axis_group, axis_group, {}, layout.starts)
    mesh = _rank_mesh(device_mesh, layout, rank)
    group = _column_group(device_mesh, layout)
    index = place - layout.starts[rank]
    axis_ranks = dist.get_process_group_ranks(axis_group)
    # Pipeline ranks may have unequal numbers of devices. Every process receives from one process on the rank before and
    # one on the rank behind, in turn, and sends to those that receive from it.
    sends = {
        step: tuple(
            axis_ranks[layout.starts[rank + step] + receiver]
            for receiver in range(layout.devices[rank + step])
            if receiver % layout.devices[rank] == index
        )
        for step in (-1, 1)
        if 0 <= rank + step < layout.ranks
    }
    return PipelinePosition(rank, mesh, group, axis_group, sends, layout.starts)


def _mesh_of_other_axes(device_mesh: DeviceMesh, layout: PipelineMesh) -> DeviceMesh:
    """Return the mesh of the axes besides the pipeline's at this rank's place on that axis, or of this rank alone."""
    others = tuple(axis.name for axis in layout.whole.axes if axis.name != layout.axis)
    if others:
        return device_mesh[others]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return DeviceMesh.from_group(alone, device_mesh.device_type, mesh_dim_names=layout.stage(0).names)


def _rank_mesh(device_mesh: DeviceMesh, layout: PipelineMesh, rank: int) -> DeviceMesh:
    """Return the mesh of the stages on this process's pipeline rank."""
    start, count = layout.starts[rank], layout.devices[rank]
    axis_ranks = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    group = dist.new_group(axis_ranks[start : start + count], use_local_synchronization=True)
    names = layout.stage(rank).names
    others = tuple(name for name in names if name in layout.whole.names)
    if count == 1:
        if others:
            return device_mesh[others]
        return DeviceMesh.from_group(group, device_mesh.device_type, mesh_dim_names=names)
    groups = [group if name == layout.axis else device_mesh.get_group(name) for name in names]
    ranks = device_mesh.mesh.narrow(layout.whole.index(layout.axis), start, count)
    return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _column_group(device_mesh: DeviceMesh, layout: PipelineMesh) -> dist.ProcessGroup:
    """Return the group of this process and the processes that it receives from, one of every other pipeline rank."""
    axis_ranks = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    this_rank = dist.get_rank()
    groups: list[dist.ProcessGroup] = []
    # The n-th process of a pipeline rank is in the n-th group; ranks with fewer processes have one in turn in it. Torch
    # names a group after its ranks and the number of groups that the process has, so a process that is not in a group
    # makes one with itself alone.
    for turn in range(max(layout.devices)):
        members = [axis_ranks[start + turn % count] for start, count in zip(layout.starts, layout.devices, strict=True)]
        is_member = this_rank in members
        group = dist.new_group(members if is_member else [this_rank], use_local_synchronization=True, sort_ranks=False)
        groups += [group] if is_member else []
    return groups[0]
