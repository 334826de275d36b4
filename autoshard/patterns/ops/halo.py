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
from autoshard.patterns.ops._positions import all_gather_stacked
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
class WindowDim:
    """A dim of positions over which a window slides.

    Attributes:
        small: the dim in the smaller image, which has one position per window, in the notation of rules.
        large: the dim in the larger one.
        sizes: of the names in them.
        halo: what the windows of a stretch need of the larger image besides the rows of the stretch; None where the
            dim can not be sharded.
    """

    small: str
    large: str
    sizes: dict[str, int]
    halo: Halo | None


def window_dim(place: int, dim: int, small: int, large: int, stride: int, before: int, reach: int) -> WindowDim:
    """Return the factors of a dim of positions, which is sharded into stretches no shorter than the halo.

    The larger image must have exactly `stride` positions for each of the smaller one, so that a stretch of the one
    belongs to a stretch of the other.

    Args:
        place: number of the dim among those of positions, for its names.
        dim: the dim of both images.
        small: size of the smaller image.
        large: size of the larger one.
        stride: by which the window moves.
        before: positions by which the first window begins before the larger image (the padding).
        reach: positions from the first to the last of a window.
    """
    after = reach - before - stride + 1
    # The halo of a stretch may not reach beyond the neighbour: a stretch has at least `least` windows.
    least = next((part for part in range(1, small + 1) if small % part == 0 and part * stride >= max(before, after)), 0)
    if large != small * stride or least in (0, small):
        return WindowDim(f"q{place}!", f"p{place}!", {}, None)
    sizes = {f"x{place}": small // least, f"m{place}": least, f"e{place}": stride}
    rows = f"x{place}^ m{place}!"
    return WindowDim(f"({rows})", f"({rows} e{place}!)", sizes, Halo(f"x{place}", dim, before, after))


def sharded_halos(call: LocalCall, dims: Iterable[WindowDim]) -> list[Halo]:
    """The halos of those dims that are sharded here."""
    halos = (dim.halo for dim in dims)
    return [halo for halo in halos if halo is not None and call.axes(halo.name)]


def window_setting(values: Sequence[int] | int, place: int) -> int:
    """A setting of a window for one dim of positions; one number may stand for all dims."""
    if isinstance(values, int):
        return values
    return values[place] if len(values) > 1 else values[0]


def halo_exchanges(dims: Iterable[WindowDim], large: TensorMeta, tensors: int = 1) -> dict[str, list[Exchange]]:
    """Bytes of exchanging the halos: the borders of every stretch, for so many tensors as large as `large`."""
    halos = [dim.halo for dim in dims if dim.halo is not None]
    return {
        halo.name: [("gather_of_each", halo.rows * large.bytes // large.shape[halo.dim])] * tensors for halo in halos
    }


def extend_by_halo(call: LocalCall, value: Any, halo: Halo, fill: float = 0.0) -> Any:
    """`value` with its neighbours' rows around it; `fill` in place of them at the two ends."""
    emit, rows = call.emit, value.shape[halo.dim]
    if halo.after < 0:  # the last windows of the stretch end before its last rows
        value = emit.slice(value, halo.dim, 0, rows + halo.after)
    after = max(halo.after, 0)
    # Its last rows stand before the next rank's stretch, its first rows behind the stretch before.
    borders = [_last_rows(call, value, halo.dim, halo.before), _first_rows(call, value, halo.dim, after)]
    borders = _neighbour_borders(call, borders, halo, fill)
    return _concatenate(call, [borders[0], value, borders[1]], halo.dim)


def fold_halo(call: LocalCall, value: Any, halo: Halo) -> Any:
    """The adjoint of `extend_by_halo`: rows computed for the neighbours go to them and are added to theirs."""
    emit, dim = call.emit, halo.dim
    after = max(halo.after, 0)
    rows = value.shape[dim] - halo.before - after
    inner = emit.slice(value, dim, halo.before, halo.before + rows)
    lent = [_last_rows(call, value, dim, after), _first_rows(call, value, dim, halo.before)]
    back = _neighbour_borders(call, lent, halo, 0.0)
    if halo.after < 0:
        inner, rows = _concatenate(call, [inner, _zeros(call, inner, dim, -halo.after)], dim), rows - halo.after
    for part, place in ((back[0], slice(0, after)), (back[1], slice(rows - halo.before, rows))):
        if part is not None:
            inner = _add_rows_at(call, inner, part, dim, place)
    return inner


def _first_rows(call: LocalCall, value: Any, dim: int, count: int) -> Any:
    return call.emit.slice(value, dim, 0, count) if count else None


def _last_rows(call: LocalCall, value: Any, dim: int, count: int) -> Any:
    rows = value.shape[dim]
    return call.emit.slice(value, dim, rows - count, rows) if count else None


def _concatenate(call: LocalCall, parts: list[Any], dim: int) -> Any:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else call.emit.cat(present, dim)


def _zeros(call: LocalCall, like: Any, dim: int, rows: int) -> Any:
    shape = list(like.shape)
    shape[dim] = rows
    return call.emit.new_zeros(like, shape)


def _add_rows_at(call: LocalCall, value: Any, part: Any, dim: int, place: slice) -> Any:
    """`value` with `part` added to its rows at `place`."""
    rows = value.shape[dim]
    around = [place.start, rows - place.stop]
    # Padded and added, since a program has no writing in place.
    zeros = [_zeros(call, value, dim, count) if count else None for count in around]
    return value + _concatenate(call, [zeros[0], part, zeros[1]], dim)


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
    emit, last = call.emit, call.share(halo.name) - 1
    neighbour = call.position(halo.name) + step
    outside = neighbour < 0 if step < 0 else neighbour > last
    # The ranks at the ends have one neighbour: they read any rank's rows, which `fill` replaces.
    inside = emit.clamp(neighbour, 0, last)
    row = emit.index_select(ranks, 0, emit.view(inside, [1]))
    row = emit.squeeze(row, 0)
    row = emit.slice(row, halo.dim, place.start, place.stop)
    return emit.masked_fill(row, outside, fill)
