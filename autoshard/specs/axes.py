"""Mesh axes: the dimensions of a device mesh, known by name and size alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One dimension of the device mesh."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise MeshError(f"mesh axis {self.name!r} has size {self.size!r}: a size is a whole number of at least 1.")


# About ten times the devices of the largest clusters: beyond it, a size is a typing error.
MOST_DEVICES = 2**20
"""The largest number of devices of a mesh."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The names and sizes of the axes of a mesh, without its devices."""

    axes: tuple[MeshAxis, ...]
    # Derived once: inner loops of planning read them far more often than meshes are made.
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(axis.name for axis in self.axes))
        object.__setattr__(self, "sizes", tuple(axis.size for axis in self.axes))
        if not self.axes:
            raise MeshError("a mesh needs at least one axis; got none.")
        if len(set(self.names)) != len(self.axes):
            raise MeshError(f"mesh axes must have different names; got {', '.join(self.names)}.")
        if self.size > MOST_DEVICES:
            raise MeshError(
                f"a mesh of {self.size} devices ({', '.join(f'{axis.name}={axis.size}' for axis in self.axes)}) is "
                f"larger than any cluster: at most {MOST_DEVICES} are planned for. Is a size a typing error?"
            )

    def __hash__(self) -> int:
        # Hashing the axes too would cost more: meshes are part of the keys of most caches.
        return hash(self.sizes)

    @staticmethod
    def of(mesh: DeviceMesh | Mapping[str, int] | MeshShape) -> MeshShape:
        """Return the shape of a `DeviceMesh`, or of a mapping such as `{"dp": 8, "tp": 8}`.

        Raises:
            MeshError: the argument is neither, has no axis, or has an axis of size below 1.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        if isinstance(mesh, Mapping):
            return MeshShape(tuple(MeshAxis(str(name), size) for name, size in mesh.items()))
        # By its attributes, so that this module needs no torch.
        if hasattr(mesh, "mesh_dim_names"):
            sizes = tuple(mesh.shape)
            # A DeviceMesh may have no names; the plan needs some.
            names = mesh.mesh_dim_names or tuple(f"axis{index}" for index in range(len(sizes)))
            return MeshShape(tuple(MeshAxis(name, size) for name, size in zip(names, sizes, strict=True)))
        raise MeshError(
            f'mesh is {type(mesh).__name__}: pass a DeviceMesh or a mapping of axis sizes such as {{"dp": 8, "tp": 8}}.'
        )

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    def index(self, name: str) -> int:
        """Return the position of the axis called `name`; raise `MeshError` if there is none."""
        if name not in self.names:
            raise MeshError(f"the mesh has no axis {name!r}; its axes are {self}.")
        return self.names.index(name)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Iterate over the coordinates of all devices, in the order of their ranks (row-major)."""
        return itertools.product(*(range(size) for size in self.sizes))

    def __str__(self) -> str:
        return ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)
