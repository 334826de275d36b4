"""A mesh with a pipeline along one of its axes: the ranks, the mesh and the devices of every stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

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
