"""A mesh with a pipeline along one of its axes: the ranks of every stage, and the mesh that they make up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.specs.axes import MeshAxis, MeshShape

ALONE = MeshAxis("device", 1)
"""The axis of a stage's mesh where the pipeline's is the only one."""


@dataclass(frozen=True, slots=True)
class PipelineMesh:
    """All axes of a mesh, one of which is a pipeline's.

    Attributes:
        whole: all axes.
        axis: name of the pipeline's.
        devices: for every pipeline rank, how many consecutive places along that axis are its own. One each, unless task
            graphs ask for other numbers (Whale, 3.2.1: devices are taken one after another, as many as each asks for).
    """

    whole: MeshShape
    axis: str
    devices: tuple[int, ...]

    @staticmethod
    def of(mesh: MeshShape, axis: str, devices: Sequence[int] = ()) -> PipelineMesh:
        """The pipeline along an axis; each place is a pipeline rank unless `devices` says otherwise.

        Raises:
            MeshError: the mesh has no such axis.
        """
        return PipelineMesh(mesh, axis, tuple(devices) or (1,) * mesh.sizes[mesh.index(axis)])

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.devices)

    @property
    def starts(self) -> tuple[int, ...]:
        """For every pipeline rank the first of its places along the axis."""
        return tuple(itertools.accumulate((0, *self.devices[:-1])))

    def rank_at(self, place: int) -> int:
        """The pipeline rank of a place along the axis."""
        return next(rank for rank in reversed(range(self.ranks)) if self.starts[rank] <= place)

    def stage(self, rank: int) -> MeshShape:
        """The mesh of a stage on a pipeline rank: the other axes, and the pipeline's own where it has several places.

        It is one of a single device where that leaves none.
        """
        count = self.devices[rank]
        axes = (replace(one, size=count) if one.name == self.axis else one for one in self.whole.axes)
        return MeshShape(tuple(one for one in axes if one.name != self.axis or count > 1) or (ALONE,))

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the mesh, in row-major order, that a pipeline rank is made of."""
        position = self.whole.index(self.axis)
        own = range(self.starts[rank], self.starts[rank] + self.devices[rank])
        return tuple(number for number, place in enumerate(self.whole.coordinates()) if place[position] in own)
