"""A mesh with a pipeline along one of its axes: the ranks, the mesh and the devices of every stage.

The position of a process in a pipeline: the mesh of its stages, and the processes that it sends to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.cluster.cluster import Cluster
from autoshard.pipeline.assign.stage_problem import StageDevice
from autoshard.specs.axes import MeshAxis, MeshShape

ALONE = MeshAxis("device", 1)
"""The axis of a stage's mesh where the pipeline's is the only one."""


@dataclass(frozen=True, slots=True)
class PipelineMesh:
    """A mesh, one axis of which is the pipeline's.

    Attributes:
        whole: all axes.
        axis: name of the pipeline's axis.
        devices: number of consecutive places along that axis that make up each pipeline rank: one, unless task graphs
            ask for other numbers (Whale, 3.2.1: devices are taken one after another, as many as each asks for).
    """

    whole: MeshShape
    axis: str
    devices: tuple[int, ...]

    @staticmethod
    def of(mesh: MeshShape, axis: str, devices: Sequence[int] = ()) -> PipelineMesh:
        """Return the pipeline along an axis; each place is a pipeline rank unless `devices` says otherwise.

        Raises:
            MeshError: the mesh has no such axis.
        """
        return PipelineMesh(mesh, axis, tuple(devices) or (1,) * mesh.sizes[mesh.index(axis)])

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.devices)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first place of every pipeline rank along the axis."""
        return tuple(itertools.accumulate((0, *self.devices[:-1])))

    def rank_at(self, place: int) -> int:
        """Return the pipeline rank of a place along the axis."""
        return next(rank for rank in reversed(range(self.ranks)) if self.starts[rank] <= place)

    def stage(self, rank: int) -> MeshShape:
        """Return the mesh of a stage: the other axes, and the pipeline's own where its rank has several places.

        A mesh of a single device stands for no axes.
        """
        count = self.devices[rank]
        axes = (replace(axis, size=count) if axis.name == self.axis else axis for axis in self.whole.axes)
        return MeshShape(tuple(axis for axis in axes if axis.name != self.axis or count > 1) or (ALONE,))

    def members(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the mesh, in row-major order, that make up a pipeline rank."""
        position = self.whole.index(self.axis)
        places = range(self.starts[rank], self.starts[rank] + self.devices[rank])
        return tuple(member for member, at in enumerate(self.whole.coordinates()) if at[position] in places)


def stage_devices(cluster: Cluster, mesh: PipelineMesh) -> tuple[StageDevice, ...]:
    """Return the device that `assign_stages` assumes for every pipeline rank.

    Args:
        cluster: the devices.
        mesh: of the pipeline.

    Returns:
        For every rank: the memory of its smallest device, in bytes; the speed of its slowest device in float32,
        relative to the slowest one of the mesh, for which a `CostModel` of the whole mesh prices; the bandwidth of the
        slowest link to the next rank.

    Raises:
        MeshError: the cluster has fewer devices.

    Source: Whale 3.3.2: work in proportion to speed, under the memory of every device.
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
