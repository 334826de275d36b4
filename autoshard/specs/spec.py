"""`Spec`: the layout of one tensor, as one torch placement for every mesh axis."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.size import Sizes, at, is_dynamic
from autoshard.specs._torch import StridedShard


class BlockShard(Placement):
    """A dim split into blocks of a given size; the last ranks of an axis may hold fewer elements or none.

    The dim consists of `split_factor` stretches. The rank at place r holds the elements r · block to (r + 1) · block of
    each, as far as they exist. `Shard` has no counterpart: for a dim (6 · 8) on an axis of 4, blocks of 16 keep every
    row of 8 whole. Only plans use this placement; a `DTensor` never has it.

    Args:
        dim: the dim that is split.
        block: the largest number of elements of a stretch on one rank.
        split_factor: number of stretches.
    """

    def __init__(self, dim: int, block: int, split_factor: int = 1) -> None:
        super().__init__()
        self.dim = dim
        self.block = block
        self.split_factor = split_factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockShard) and _key(self) == _key(other)

    def __hash__(self) -> int:
        return hash((self.dim, self.block, self.split_factor))

    def __repr__(self) -> str:
        return f"BlockShard(dim={self.dim}, block={self.block}, split_factor={self.split_factor})"


class Routed(Placement):
    """Rows sorted by group; the data decides how many a rank holds.

    Rows are sent to groups, as tokens are to experts. With `"group"`, every rank of the axis
    holds the rows of its own stretch of the groups. With `"source"`, every rank holds the rows, of all groups, that
    come from its own stretch of the tokens. No reshard leads from or to this placement: operators that route produce
    it, and operators that gather routed rows consume it. Programs and prices count equal shares. Only plans use it.

    Args:
        dim: the dim of the rows or groups; None for a tensor that describes a rank's rows without holding them.
        by: `"group"` or `"source"`.
    """

    def __init__(self, dim: int | None, by: str) -> None:
        super().__init__()
        self.dim = dim
        self.by = by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routed) and placement_text(self) == placement_text(other)

    def __hash__(self) -> int:
        return hash((self.dim, self.by))

    def __repr__(self) -> str:
        return f"Routed(dim={self.dim}, by={self.by!r})"


def shard_placement(dim: int, split_factor: int = 1) -> Placement:
    """Return `Shard(dim)`, or `_StridedShard(dim, split_factor=...)` where an outer factor stays whole (Rhino 4.1)."""
    if is_dynamic(split_factor):
        return _DynamicStride(dim, split_factor)
    # For torch, a strided shard of factor 1 differs from `Shard`: use `Shard` for both.
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


class _DynamicStride(StridedShard):
    """A strided shard whose outer factor is a dynamic size, which torch's class would convert to an int."""

    def __init__(self, dim: int, split_factor: int) -> None:
        # The value in the example, since torch's methods, such as `repr`, need a number.
        super().__init__(dim, split_factor=int(split_factor))
        self.dynamic_factor = split_factor


class _PlacementKind(NamedTuple):
    """The kind of a class of placements."""

    shard: bool
    strided: bool
    block: bool
    dynamic: bool


def _kind_of(placement: Placement) -> _PlacementKind:
    # By class and remembered: torch's placements have slow instance checks, and this runs in inner loops.
    kind: Any = type(placement)
    return _kind_of_class(kind)


@cache
def _kind_of_class(kind: Any) -> _PlacementKind:
    return _PlacementKind(
        shard=issubclass(kind, (Shard, StridedShard, BlockShard)),
        strided=issubclass(kind, StridedShard),
        block=issubclass(kind, BlockShard),
        dynamic=issubclass(kind, _DynamicStride),
    )


def is_shard(placement: Placement) -> bool:
    """Return True for `Shard`, `_StridedShard` and `BlockShard`."""
    return _kind_of(placement).shard


def split_factor_of(placement: Placement) -> int:
    """Return the split factor of a shard placement, the size of its undivided outer factor; 1 for `Shard`."""
    kind = _kind_of(placement)
    if kind.dynamic:
        return placement.dynamic_factor  # type: ignore[attr-defined]
    if kind.block:
        return placement.split_factor  # type: ignore[attr-defined]
    return int(placement.split_factor) if kind.strided else 1  # type: ignore[attr-defined]


def block_of(placement: Placement) -> int | None:
    """Return the block size of a `BlockShard`; None for every other placement."""
    return placement.block if _kind_of(placement).block else None  # type: ignore[attr-defined]


def placement_text(placement: Placement) -> str:
    """Return the short text of a placement: `R`, `S(0)`, `S(0,f=3)`, `S(0,f=3,b=8)`, `S(0,by=group)`, `P(sum)`."""
    if is_shard(placement):
        factor, block = split_factor_of(placement), block_of(placement)
        dim = placement.dim  # type: ignore[attr-defined]
        return f"S({dim}{'' if factor == 1 else f',f={factor}'}{'' if block is None else f',b={block}'})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if isinstance(placement, Routed):
        return f"S({'' if placement.dim is None else f'{placement.dim},'}by={placement.by})"
    if isinstance(placement, Replicate):
        return "R"
    raise ValueError(f"unknown placement {placement!r}: autoshard knows Replicate, Shard, _StridedShard and Partial.")


_PLACEMENT = re.compile(
    r"R|S\((?P<dim>-?\d+)(?:,f=(?P<factor>\d+))?(?:,b=(?P<block>\d+))?\)"
    r"|S\((?:(?P<rows>\d+),)?by=(?P<by>group|source)\)|P\((?P<op>\w+)\)"
)


def parse_placement(text: str) -> Placement:
    """Return the placement that `placement_text` wrote; raise `ValueError` for any other text."""
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a placement: expected R, S(dim), S(dim,f=factor), with ,b=block, S(dim,by=group), or "
            "P(operation)."
        )
    if match["by"] is not None:
        return Routed(None if match["rows"] is None else int(match["rows"]), match["by"])
    # Blocks before dims: a `BlockShard` has both.
    if match["block"] is not None:
        return BlockShard(int(match["dim"]), int(match["block"]), int(match["factor"] or 1))
    if match["dim"] is not None:
        return shard_placement(int(match["dim"]), int(match["factor"] or 1))
    return Partial(match["op"]) if match["op"] is not None else Replicate()


class Spec:
    """The placements of one tensor over all mesh axes: immutable, hashable, interned (equal specs are one object).

    Attributes:
        placements: one per mesh axis.
        is_replicated: True if every placement is `Replicate`.
        partial_axes: axes over which the tensor is still to be reduced.
        shard_axes: axes over which the tensor is sharded.
        has_blocks: True if a placement is a `BlockShard`, which torch does not know.
        is_routed: True if a placement is `Routed`, so that the data decides how much a rank holds.
    """

    __slots__ = (
        "__weakref__",
        "_text",
        "has_blocks",
        "is_replicated",
        "is_routed",
        "partial_axes",
        "placements",
        "shard_axes",
    )
    _text: str
    placements: tuple[Placement, ...]
    is_replicated: bool
    partial_axes: tuple[int, ...]
    shard_axes: tuple[int, ...]
    has_blocks: bool
    is_routed: bool

    def __new__(cls, placements: tuple[Placement, ...]) -> Spec:
        return Spec.of(*placements)

    @staticmethod
    def of(*placements: Placement) -> Spec:
        """Return the spec with these placements, one per mesh axis."""
        # Equal specs are one object, so that comparisons and lookups compare pointers.
        return _intern(tuple(_key(placement) for placement in placements))

    @staticmethod
    def all_replicated(ndim: int) -> Spec:
        """Return the spec that is replicated over `ndim` mesh axes."""
        return _intern(("R",) * ndim)

    @staticmethod
    def parse(text: str) -> Spec:
        """Return the spec that `str` wrote, such as `"S(0) R P(sum)"`."""
        return Spec.of(*(parse_placement(part) for part in text.split()))

    def replace(self, axis: int, placement: Placement) -> Spec:
        """Return this spec with another placement on one axis."""
        return Spec.of(*self.placements[:axis], placement, *self.placements[axis + 1 :])

    def at(self, sizes: Sizes) -> Spec:
        """Return this spec with its dynamic sizes evaluated at `sizes`."""
        if not sizes:
            return self
        # Placements without dynamic sizes have a text as key, and are unique objects.
        keys = zip(self.placements, map(_key, self.placements), strict=True)
        return Spec.of(*(placement if isinstance(key, str) else _placement(at(key, sizes)) for placement, key in keys))

    @property
    def balanced(self) -> Spec:
        """This spec with routed rows spread evenly over the ranks."""
        result = self
        for axis, placement in enumerate(self.placements) if self.is_routed else ():
            if isinstance(placement, Routed):
                result = result.replace(axis, Replicate() if placement.dim is None else Shard(placement.dim))
        return result

    def __len__(self) -> int:
        return len(self.placements)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __getitem__(self, axis: int) -> Placement:
        return self.placements[axis]

    # Equality and hash are those of object, by identity. Copies and unpickled specs have to be the interned ones.

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Spec.parse, (self._text,)

    def __copy__(self) -> Spec:
        return self

    def __deepcopy__(self, memo: object) -> Spec:
        return self

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Spec({self})"


@cache
def _intern(keys: tuple[_Key, ...]) -> Spec:
    # Not `Spec(...)`: its `__new__` looks up the interned spec, which would call this function again.
    spec = object.__new__(Spec)
    spec.placements = tuple(map(_placement, keys))
    spec._text = " ".join(map(placement_text, spec.placements))
    spec.is_replicated = all(isinstance(placement, Replicate) for placement in spec.placements)
    spec.partial_axes = tuple(axis for axis, placement in enumerate(spec.placements) if isinstance(placement, Partial))
    spec.shard_axes = tuple(axis for axis, placement in enumerate(spec.placements) if is_shard(placement))
    spec.has_blocks = any(isinstance(placement, BlockShard) for placement in spec.placements)
    spec.is_routed = any(isinstance(placement, Routed) for placement in spec.placements)
    return spec


_Key = str | tuple[int, int, int]
"""The text of a placement; with dynamic sizes, which have no text, its dim, split factor and block."""


def _key(placement: Placement) -> _Key:
    factor, block = split_factor_of(placement), block_of(placement) or 0
    # A dynamic size prints as its value in the example: two sizes of equal values would have one key.
    if is_dynamic(factor) or is_dynamic(block):
        return (placement.dim, factor, block)  # type: ignore[attr-defined]
    return placement_text(placement)


def _placement(key: _Key) -> Placement:
    if isinstance(key, str):
        return parse_placement(key)
    dim, factor, block = key
    return BlockShard(dim, block, factor) if block else shard_placement(dim, factor)
