"""Mesh axes by name and size, and axes whose ranks hold unequal shares of a dynamic size (Whale, 3.3.1)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy

from autoshard.errors import MeshError
from autoshard.size import DynamicSize, Ratio, Sizes, symbol

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
        # Duck-typed, so that this module does not import torch.
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


@dataclass(frozen=True, slots=True)
class SharedAxis:
    """A mesh axis with unequal shares, and the symbols of a program whose values differ from rank to rank.

    Attributes:
        axis: the index of the mesh axis.
        ranks: its size.
        whole: the dynamic size that is shared.
    """

    axis: int
    ranks: int
    whole: sympy.Symbol

    @property
    def own_share(self) -> sympy.Symbol:
        """The share of this rank."""
        return symbol(f"{self.whole}_own")

    @property
    def share_before(self) -> sympy.Symbol:
        """The sum of the shares of the ranks before this one."""
        return symbol(f"{self.whole}_before")

    @property
    def largest_share(self) -> sympy.Symbol:
        """The largest share of any rank."""
        return symbol(f"{self.whole}_most")

    def share_of_rank(self, rank: int) -> sympy.Expr:
        """Return the share of a rank."""
        if rank < self.ranks - 1:
            return symbol(f"{self.whole}_of_{rank}")
        # The last share has no symbol, so that the shares add up to the whole by construction.
        return self.whole - sum(self.share_of_rank(earlier_rank) for earlier_rank in range(rank))

    def sizes(self, counts: Sequence[int], rank: int) -> Sizes:
        """Return the values of the symbols on a rank, where the ranks hold `counts`."""
        shares: dict[sympy.Symbol, int] = {self.share_of_rank(place): count for place, count in enumerate(counts[:-1])}
        return {
            self.own_share: counts[rank],
            self.share_before: sum(counts[:rank]),
            self.largest_share: max(counts),
            **shares,
        }

    def example(self, sizes: Sizes) -> Sizes:
        """Return these sizes, with shares as equal as possible, on the last rank with a largest share."""
        least, more = divmod(sizes[self.whole], self.ranks)
        counts = [least + (rank < more) for rank in range(self.ranks)]
        # A rank with a largest share: programs are made at these sizes, and memory is counted for the largest.
        return {**sizes, **self.sizes(counts, max(more - 1, 0))}

    def with_share(self, number: int | float, sizes: Sizes) -> int | float:
        """Return a number with one rank's equal block replaced by its share.

        Args:
            number: a number that may depend on dynamic sizes.
            sizes: the values of all symbols, as `example` returns them.

        Raises:
            ValueError: the number is neither a multiple of a block or share nor a number of the whole.
        """
        if not isinstance(number, (DynamicSize, Ratio)):
            return number
        # Programs are made with equal blocks, ceil(whole / ranks): replace them by the share.
        expr = number.expr.xreplace({sympy.ceiling(self.whole / self.ranks): self.own_share})
        steps = sympy.cancel(expr / self.own_share) if self.own_share in expr.free_symbols else expr
        # A remaining rounding of the whole counts other blocks, which have no counterpart in shares.
        rounded = any(self.whole in part.free_symbols for part in expr.atoms(sympy.floor, sympy.ceiling, sympy.Mod))
        if rounded or self.own_share in steps.free_symbols:
            raise ValueError(f"{number.expr} is neither a multiple of a rank's share nor a number of the whole")
        return number if expr == number.expr else type(number).of(expr, sizes)

    def is_multiple(self, size: int, blocks: int) -> bool:
        """Return True if `size / blocks` is an integer multiple of the whole or independent of it."""
        return not self.is_of_whole(size) or bool(sympy.cancel(size.expr / self.whole / blocks).is_Integer)  # type: ignore[attr-defined]

    def is_shared(self, shape: Sequence[int]) -> bool:
        """Return True if some dim of a local shape depends on this rank's share."""
        return any(
            isinstance(size, (DynamicSize, Ratio)) and self.own_share in size.expr.free_symbols for size in shape
        )

    def is_whole(self, size: int) -> bool:
        """Return True if a size is the shared dynamic size."""
        return isinstance(size, DynamicSize) and size.expr == self.whole

    def is_of_whole(self, size: int) -> bool:
        """Return True if a size depends on the shared dynamic size."""
        return isinstance(size, DynamicSize) and self.whole in size.expr.free_symbols
