"""Halos: rows that lie next to a rank's stretch of a dim and belong to its neighbours.

A window that slides over a sharded dim reaches into the neighbours' stretches. Its operand is extended by the rows that
it reaches; what was computed for such rows, a gradient, is given back and added where it belongs, which is the adjoint.
The ranks gather the borders of all stretches and pick their neighbours', so that one program serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import all_gather_stacked
from autoshard.patterns.rule import Exchange, TensorMeta


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows of the neighbours that a window needs along one sharded dim.

    Attributes:
        name: the factor that is sharded.
        dim: the dim of the tensor.
        before: rows of the rank before, at most as many as a stretch has.
        after: rows of the rank after; negative where the window leaves out the last rows of the stretch.
    """

    name: str
    dim: int
    before: int
    after: int

    @property
    def rows(self) -> int:
        """Rows of the neighbours, on both sides."""
        return self.before + max(self.after, 0)


@dataclass(frozen=True, slots=True)
class Windows:
    """The dims of positions of two images, over which windows slide: one of the smaller image has a position for each.

    Attributes:
        small: dims of positions of the smaller image, in the notation of rules.
        large: those of the larger one.
        sizes: sizes of the names in them.
        halos: for every dim that can be sharded, what the windows of a stretch need of the larger image besides it.
    """

    small: list[str]
    large: list[str]
    sizes: dict[str, int]
    halos: list[Halo]

    def sharded_halos(self, call: LocalCall) -> list[Halo]:
        """The halos of those dims that are sharded here."""
        return [halo for halo in self.halos if call.axes(halo.name)]

    def exchanges(self, large: TensorMeta, tensors: int = 1) -> dict[str, list[Exchange]]:
        """Bytes of exchanging the borders of every stretch, for so many tensors as large as `large`."""
        return {
            halo.name: [("gather_of_each", halo.rows * large.bytes // large.shape[halo.dim])] * tensors
            for halo in self.halos
        }


def windows_over(
    first: int,
    small: Sequence[int],
    large: Sequence[int],
    strides: Sequence[int],
    before: Sequence[int],
    reaches: Sequence[int],
) -> Windows:
    """Return the factors of the dims of positions, which are sharded into stretches no shorter than the halo.

    The larger image must have exactly `stride` positions for each of the smaller one, so that a stretch of the one
    belongs to a stretch of the other.

    Args:
        first: the first dim of positions of both images.
        small: sizes of the smaller image; 0 where windows lie in no such order.
        large: sizes of the larger one.
        strides: by which windows move.
        before: positions by which the first window begins before the larger image (the padding).
        reaches: positions from the first to the last of a window.
    """
    windows = Windows([], [], {}, [])
    for place, (less, more, stride, ahead, reach) in enumerate(
        zip(small, large, strides, before, reaches, strict=True)
    ):
        after = reach - ahead - stride + 1
        # The halo of a stretch may not reach beyond the neighbour: a stretch has at least `least` windows.
        parts = (part for part in range(1, less + 1) if less % part == 0 and part * stride >= max(ahead, after))
        least = next(parts, 0)
        if more != less * stride or least in (0, less):
            windows.small.append(f"q{place}!")
            windows.large.append(f"p{place}!")
            continue
        windows.small.append(f"(x{place}^ m{place}!)")
        windows.large.append(f"(x{place}^ m{place}! e{place}!)")
        windows.sizes.update({f"x{place}": less // least, f"m{place}": least, f"e{place}": stride})
        windows.halos.append(Halo(f"x{place}", first + place, ahead, after))
    return windows


def window_settings(values: Sequence[int] | int, count: int) -> Sequence[int]:
    """A setting of windows for every dim of positions; one number may stand for all of them."""
    if isinstance(values, int):
        return [values] * count
    return values if len(values) > 1 else list(values) * count


def padding_beside(halos: Iterable[Halo], first: int, padding: Sequence[int]) -> list[int]:
    """The padding of dims of positions, the first of which is `first`: none where a halo takes its place."""
    bare = {halo.dim - first for halo in halos}
    return [0 if place in bare else size for place, size in enumerate(padding)]


def extend_by_halos(call: LocalCall, value: Any, halos: Iterable[Halo], fill: float = 0.0) -> Any:
    """`value` with its neighbours' rows around it along several dims; `fill` in place of them at the two ends."""
    for halo in halos:
        rows = value.shape[halo.dim]
        if halo.after < 0:  # the last windows of the stretch end before its last rows
            value = value.slice(halo.dim, 0, rows + halo.after)
        # Its last rows stand before the next rank's stretch, its first rows behind the stretch before.
        borders = [_last_rows(value, halo.dim, halo.before), _first_rows(value, halo.dim, max(halo.after, 0))]
        before, behind = _neighbour_borders(call, borders, halo, fill)
        value = _concatenate(call, [before, value, behind], halo.dim)
    return value


def fold_halos(call: LocalCall, value: Any, halos: Iterable[Halo]) -> Any:
    """The adjoint of `extend_by_halos`: rows computed for the neighbours go to them and are added to theirs."""
    for halo in halos:
        dim, after = halo.dim, max(halo.after, 0)
        rows = value.shape[dim] - halo.before - after
        inner = value.slice(dim, halo.before, halo.before + rows)
        lent = [_last_rows(value, dim, after), _first_rows(value, dim, halo.before)]
        back = _neighbour_borders(call, lent, halo, 0.0)
        if halo.after < 0:
            inner, rows = _concatenate(call, [inner, _zeros(inner, dim, -halo.after)], dim), rows - halo.after
        for part, place in ((back[0], slice(0, after)), (back[1], slice(rows - halo.before, rows))):
            if part is not None:
                # Padded and added, since a program has no writing in place.
                around = (_zeros(inner, dim, count) for count in (place.start, inner.shape[dim] - place.stop))
                inner = inner + _concatenate(call, [next(around), part, next(around)], dim)
        value = inner
    return value


def _first_rows(value: Any, dim: int, count: int) -> Any:
    return value.slice(dim, 0, count) if count else None


def _last_rows(value: Any, dim: int, count: int) -> Any:
    rows = value.shape[dim]
    return value.slice(dim, rows - count, rows) if count else None


def _concatenate(call: LocalCall, parts: list[Any], dim: int) -> Any:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else call.emit.cat(present, dim)


def _zeros(like: Any, dim: int, rows: int) -> Any:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_zeros(shape) if rows else None


def _neighbour_borders(call: LocalCall, borders: list[Any], halo: Halo, fill: float) -> list[Any]:
    """The first border of the rank before and the second of the rank after; `fill` where there is no such rank."""
    if all(border is None for border in borders):
        return borders
    # One gather of both borders: an exchange with neighbours alone would branch on the rank.
    ranks = all_gather_stacked(call, _concatenate(call, borders, halo.dim), halo.name)
    rows = [0 if border is None else border.shape[halo.dim] for border in borders]
    before = _neighbour_rows(call, ranks, halo, -1, slice(0, rows[0]), fill) if rows[0] else None
    after = _neighbour_rows(call, ranks, halo, 1, slice(rows[0], sum(rows)), fill) if rows[1] else None
    return [before, after]


def _neighbour_rows(call: LocalCall, ranks: Any, halo: Halo, step: int, place: slice, fill: float) -> Any:
    """Rows at `place` of what the rank `step` further on has in `ranks`; `fill` where there is no such rank."""
    last = call.share(halo.name) - 1
    neighbour = call.position(halo.name) + step
    outside = neighbour < 0 if step < 0 else neighbour > last
    # The ranks at the ends have one neighbour: they read any rank's rows, which `fill` replaces.
    row = ranks.index_select(0, neighbour.clamp(0, last).view([1])).squeeze(0)
    return row.slice(halo.dim, place.start, place.stop).masked_fill(outside, fill)
