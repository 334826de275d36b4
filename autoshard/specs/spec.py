"""`Spec`: where one tensor lies, as one torch placement for every mesh axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.size import Sizes, at, is_dynamic
from autoshard.specs._torch import StridedShard


class BlockShard(Placement):
    """A dim in blocks of a size of their own, of which the last ranks of an axis may have few elements or none.

    The dim is `split_factor` stretches, and of each the rank at place r holds the elements from r · block up to
    (r + 1) · block, as far as there are any. So it says what `Shard` can not: of a dim (6 · 8) on an axis of 4, blocks
    of 16 keep every row of 8 whole. Only plans use it; a `DTensor` never lies so.

    Args:
        dim: the dim that is split.
        block: elements of a stretch that one rank holds, at most.
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
    """Rows that are sorted by group, of which a rank holds those that came to it: how many is decided by the data.

    Rows are sent to groups, as tokens are to experts, and lie sorted by group. `"group"`: every rank of the axis holds
    the rows of its own stretch of the groups. `"source"`: every rank holds, of all groups, the rows that were made of
    its own stretch of the tokens. No path leads from or to such a placement: operators that route make it, and
    operators that gather what was routed take it. Programs and prices count on the balanced share. Only plans use it.

    Args:
        dim: the dim that the rows, or the groups, lie along; None of a tensor that only speaks of a rank's rows.
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
    """`Shard(dim)`, or `_StridedShard(dim, split_factor=...)` where an outer factor stays whole (Rhino 4.1)."""
    if is_dynamic(split_factor):
        return _DynamicStride(dim, split_factor)
    return Shard(dim) if split_factor == 1 else StridedShard(dim, split_factor=split_factor)


class _DynamicStride(StridedShard):
    """A strided shard whose outer factor is a dynamic size, which torch's own makes a plain number."""

    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim, split_factor=int(split_factor))
        self.dynamic_factor = split_factor


class _PlacementKind(NamedTuple):
    """What a class of placements is. Torch takes long to say that of an object, and is asked it very often."""

    shard: bool
    strided: bool
    block: bool
    dynamic: bool


def _kind_of(placement: Placement) -> _PlacementKind:
    own: Any = type(placement)
    return _kind_of_class(own)


@cache
def _kind_of_class(kind: Any) -> _PlacementKind:
    return _PlacementKind(
        shard=issubclass(kind, (Shard, StridedShard, BlockShard)),
        strided=issubclass(kind, StridedShard),
        block=issubclass(kind, BlockShard),
        dynamic=issubclass(kind, _DynamicStride),
    )


def is_shard(placement: Placement) -> bool:
    """Whether the placement is `Shard`, `_StridedShard` or `BlockShard`."""
    return _kind_of(placement).shard


def split_factor_of(placement: Placement) -> int:
    """Size of the outer factor that a shard placement leaves whole; 1 for `Shard`."""
    kind = _kind_of(placement)
    if kind.dynamic:
        return placement.dynamic_factor  # type: ignore[attr-defined]
    if kind.block:
        return placement.split_factor  # type: ignore[attr-defined]
    return int(placement.split_factor) if kind.strided else 1  # type: ignore[attr-defined]


def block_of(placement: Placement) -> int | None:
    """Elements of a stretch that a `BlockShard` gives to one rank; None for every other placement."""
    return placement.block if _kind_of(placement).block else None  # type: ignore[attr-defined]


def placement_text(placement: Placement) -> str:
    """Short text of a placement: `R`, `S(0)`, `S(0,f=3)`, `S(0,f=3,b=8)`, `S(0,by=group)`, `P(sum)`."""
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
    """The placement that `placement_text` wrote; `ValueError` when it is not one."""
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a placement: expected R, S(dim), S(dim,f=factor), with ,b=block, S(dim,by=group), or "
            "P(operation)."
        )
    if match["by"] is not None:
        return Routed(None if match["rows"] is None else int(match["rows"]), match["by"])
    if match["block"] is not None:
        return BlockShard(int(match["dim"]), int(match["block"]), int(match["factor"] or 1))
    if match["dim"] is not None:
        return shard_placement(int(match["dim"]), int(match["factor"] or 1))
    return Partial(match["op"]) if match["op"] is not None else Replicate()


class Spec:
    """The placements of one tensor over all mesh axes: immutable, hashable, interned (equal specs are one object).

    Attributes:
        placements: one per mesh axis.
        is_replicated: whether every one is `Replicate`.
        partial_axes: axes over which the tensor is still to be reduced.
        shard_axes: axes over which the tensor is sharded.
        has_blocks: whether a placement is a `BlockShard`, which torch does not know.
        is_routed: whether the data decides how much a rank holds: some placement is `Routed`.
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
        """The spec with these placements, one per mesh axis."""
        return _intern(tuple(_key(placement) for placement in placements))

    @staticmethod
    def all_replicated(ndim: int) -> Spec:
        """Replicated over every one of `ndim` mesh axes."""
        return _intern(("R",) * ndim)

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec that `str` wrote, such as `"S(0) R P(sum)"`."""
        return Spec.of(*(parse_placement(part) for part in text.split()))

    def replace(self, axis: int, placement: Placement) -> Spec:
        """This spec with another placement on one axis."""
        return Spec.of(*self.placements[:axis], placement, *self.placements[axis + 1 :])

    def at(self, sizes: Sizes) -> Spec:
        """This spec with its dynamic sizes taken at `sizes`; itself without any."""
        return Spec.of(*(_placement_at(placement, sizes) for placement in self.placements)) if sizes else self

    @property
    def balanced(self) -> Spec:
        """The spec of as much as each rank holds where routed rows are spread evenly; the spec itself without such."""
        if not self.is_routed:
            return self
        return Spec.of(
            *(
                placement
                if not isinstance(placement, Routed)
                else Replicate()
                if placement.dim is None
                else Shard(placement.dim)
                for placement in self.placements
            )
        )

    def __len__(self) -> int:
        return len(self.placements)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __getitem__(self, axis: int) -> Placement:
        return self.placements[axis]

    # Equality and hash are identity: equal specs are one object.

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
    spec = object.__new__(Spec)
    spec.placements = tuple(map(_placement, keys))
    spec._text = " ".join(map(placement_text, spec.placements))
    spec.is_replicated = not _axes_of(spec, lambda placement: not isinstance(placement, Replicate))
    spec.partial_axes = _axes_of(spec, lambda placement: isinstance(placement, Partial))
    spec.shard_axes = _axes_of(spec, is_shard)
    spec.has_blocks = bool(_axes_of(spec, lambda placement: isinstance(placement, BlockShard)))
    spec.is_routed = bool(_axes_of(spec, lambda placement: isinstance(placement, Routed)))
    return spec


def _axes_of(spec: Spec, meets: Callable[[Placement], bool]) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(spec.placements) if meets(placement))


_Key = str | tuple[int, int, int]
"""A placement by its text; where sizes in it are dynamic, which have no text of their own: dim, split factor, block."""


def _key(placement: Placement) -> _Key:
    factor, block = split_factor_of(placement), block_of(placement) or 0
    if is_dynamic(factor) or is_dynamic(block):
        return (placement.dim, factor, block)  # type: ignore[attr-defined]
    return placement_text(placement)


def _placement_at(placement: Placement, sizes: Sizes) -> Placement:
    key = _key(placement)
    return placement if isinstance(key, str) else _placement(at(key, sizes))


def _placement(key: _Key) -> Placement:
    if isinstance(key, str):
        return parse_placement(key)
    dim, factor, block = key
    return BlockShard(dim, block, factor) if block else shard_placement(dim, factor)
