"""Lowering of a path to functional collectives and local operators on the tensors of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import sympy
import torch

from autoshard.reshard.path import Path, Step
from autoshard.reshard.states import state_of
from autoshard.specs.emitter import Emitter, EmitterWithShares, all_reduce, collective, collectives
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec

aten = torch.ops.aten


@runtime_checkable
class KnowsStrides(Protocol):
    """An emitter that knows strides. With any other, every input of a collective is copied to be contiguous."""

    def is_contiguous(self, value: Any) -> bool:
        """Return True if the value is row-major in memory."""


def lower(path: Path, value: Any, emit: Emitter, dtype: torch.dtype) -> Any:
    """Emit the steps of a path.

    One program serves all ranks: a rank's coordinate enters only as a value.

    Args:
        path: the steps, from the spec `path.source` of `value`.
        value: local value, of shape `local_shape(path.shape, path.source, mesh)`. The padding of unevenly sharded dims
            is never read.
        emit: emits the operators.
        dtype: dtype of the value.

    Returns:
        The local value under `path.target`, contiguous after any collective or slice; `value` itself where the path
        has no steps.
    """
    if not path.steps:
        return value
    if not dtype.is_complex:
        return _lower_real(path, value, emit)
    # Collectives do not take complex numbers: view them as pairs of real numbers in an unsharded last dim.
    # Resolve lazy conjugation first, which a view as pairs does not support.
    parts = emit.call(aten.view_as_real.default, emit.call(aten.resolve_conj.default, value))
    shape = (*path.shape, 2)
    parts = _lower_real(Path(shape, path.source, path.target, path.steps), parts, emit)
    return emit.call(aten.view_as_complex.default, parts)


def _lower_real(path: Path, value: Any, emit: Emitter) -> Any:
    for step in path.steps:
        value = _LOWERINGS[step.kind](_Move.of(path.shape, step, emit), value)
    return value


@dataclass(frozen=True, slots=True)
class _Piece:
    """The loop of an axis in a local tensor.

    Attributes:
        dim: the dim.
        outer: steps of the local loops outside of it in that dim.
        block, total: the share of one rank where the axis does not divide its loop; 0 otherwise.
    """

    dim: int
    outer: int
    block: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class _Move:
    """One step with the local shapes and the loops of its axis before and after."""

    step: Step
    emit: Emitter
    size: int
    shape: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    source: _Piece | None
    target: _Piece | None

    @staticmethod
    def of(shape: tuple[int, ...], step: Step, emit: Emitter) -> _Move:
        return _Move(
            step=step,
            emit=emit,
            size=emit.mesh.sizes[step.axis],
            shape=shape,
            before=local_shape(shape, step.source, emit.mesh),
            after=local_shape(shape, step.target, emit.mesh),
            source=_piece(shape, step.source, step.axis, emit),
            target=_piece(shape, step.target, step.axis, emit),
        )


def _piece(shape: tuple[int, ...], spec: Spec, axis: int, emit: Emitter) -> _Piece | None:
    state = state_of(shape, spec, emit.mesh)
    assert state is not None, f"{spec} is no state of shape {shape}"
    place = state.place(axis)
    if place is None:
        return None
    dim, loop = place
    return _Piece(dim, loop.outer, loop.block, loop.total)


def _all_gather(move: _Move, value: Any) -> Any:
    assert move.source is not None
    emit, piece = move.emit, move.source
    shares = shared_axis(emit, move.step.axis, move.before)
    if shares is not None:
        dim, opened = _separate_outer(move.before, piece)
        return _view(emit, gather_shares(emit, shares, _contiguous(emit, value), opened, dim), move.after)
    value = _contiguous(emit, value)
    value = collective(emit, collectives.all_gather_into_tensor.default, value, move.size, axis=move.step.axis)
    return _insert(move, value, move.before, piece)


def _all_reduce(move: _Move, value: Any) -> Any:
    operation = _reduction(move)
    if operation != "avg":
        return all_reduce(move.emit, value, move.step.axis, operation)
    # A sum and a division: not every backend supports averages.
    return _divide(move, all_reduce(move.emit, value, move.step.axis))


def _reduce_scatter(move: _Move, value: Any) -> Any:
    assert move.target is not None
    emit, operation = move.emit, _reduction(move)
    # The n-th rank gets the n-th part of dim 0, so the blocks have to be consecutive.
    value, _ = _extract(move, value, move.before, move.target)
    kind = "sum" if operation == "avg" else operation
    value = collective(emit, collectives.reduce_scatter_tensor.default, value, kind, move.size, axis=move.step.axis)
    value = _view(emit, value, move.after)
    return _divide(move, value) if operation == "avg" else value


def _all_to_all(move: _Move, value: Any) -> Any:
    assert move.source is not None
    assert move.target is not None
    emit = move.emit
    cut, joint = _pieces_between(move.source, move.target, move.size)
    value, block = _extract(move, value, move.before, cut)
    value = _view(emit, value, (move.size, *block))
    # One row of dim 0 to and from every rank.
    ones = [1] * move.size
    value = collective(emit, collectives.all_to_all_single.default, value, ones, ones, axis=move.step.axis)
    return _insert(move, value, block, joint)


def _pieces_between(source: _Piece, target: _Piece, size: int) -> tuple[_Piece, _Piece]:
    """Return the loops where an all-to-all splits the local tensor into blocks, and where it joins received blocks."""
    if source.dim != target.dim:
        return target, source
    # Within one dim, `outer` of the inner loop counts the steps of the outer loop, which is distributed meanwhile: an
    # outer target already when blocks are joined, an outer source still when they are split.
    if target.outer < source.outer:
        return target, _Piece(source.dim, source.outer // size)
    return _Piece(target.dim, target.outer // size), source


def _slice(move: _Move, value: Any) -> Any:
    assert move.target is not None
    emit, piece = move.emit, move.target
    shares = shared_axis(emit, move.step.axis, move.after)
    if shares is not None:
        dim, opened = _separate_outer(move.before, piece)
        return _view(emit, cut_share(emit, shares, value, opened, dim), move.after)
    value, padded = _pad(move, value, move.before, piece)
    value = _view(emit, value, _split_shape(padded, piece, move.size))
    # `index_select` takes the coordinate as a tensor; a slice would need a number, which differs between ranks.
    index = emit.call(aten.view.default, emit.coordinate(move.step.axis), [1])
    value = emit.call(aten.index_select.default, value, piece.dim + 1, index)
    return _view(emit, value, move.after)


def _make_partial(move: _Move, value: Any) -> Any:
    """Keep the value on the first rank and give all others the neutral element of the reduction."""
    operation = move.step.target[move.step.axis].reduce_op  # type: ignore[attr-defined]
    neutral = {"sum": 0, "product": 1}.get(operation)
    if neutral is None:
        # Averages and extremes of equal values are these values.
        return value
    behind = move.emit.call(aten.gt.Scalar, move.emit.coordinate(move.step.axis), 0)
    return move.emit.call(aten.masked_fill.Scalar, value, behind, neutral)


_LOWERINGS: dict[str, Callable[[_Move, Any], Any]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "make_partial": _make_partial,
}


def _reduction(move: _Move) -> str:
    return str(move.step.source[move.step.axis].reduce_op)  # type: ignore[attr-defined]


def _divide(move: _Move, value: Any) -> Any:
    return move.emit.call(aten.div.Scalar, value, move.size)


def _split_shape(shape: Sequence[int], piece: _Piece, size: int) -> tuple[int, ...]:
    """Return `shape` with its dim `piece.dim` split into (outer, size, inner)."""
    inner = shape[piece.dim] // (piece.outer * size)
    return (*shape[: piece.dim], piece.outer, size, inner, *shape[piece.dim + 1 :])


def _extract(move: _Move, value: Any, shape: tuple[int, ...], piece: _Piece) -> tuple[Any, tuple[int, ...]]:
    """Return the blocks for the ranks of the axis, consecutive in memory, and the shape of a block."""
    emit = move.emit
    value, shape = _pad(move, value, shape, piece)
    block = (*shape[: piece.dim], shape[piece.dim] // move.size, *shape[piece.dim + 1 :])
    if math.prod(shape[: piece.dim]) * piece.outer == 1:
        value = _contiguous(emit, value)
        # Collectives split along dim 0: leading dims of size 1 must not hide the blocks.
        return (value if piece.dim == 0 else _view(emit, value, (move.size, *block))), block
    value = _view(emit, value, _split_shape(shape, piece, move.size))
    front = piece.dim + 1
    order = [front, *(dim for dim in range(len(shape) + 2) if dim != front)]
    value = _copy(emit, emit.call(aten.permute.default, value, order))
    return _view(emit, value, (move.size * block[0], *block[1:])), block


def _insert(move: _Move, value: Any, block: tuple[int, ...], piece: _Piece) -> Any:
    """Join blocks that are consecutive in memory along the loop `piece` of the axis."""
    emit = move.emit
    joined_shape = (*block[: piece.dim], block[piece.dim] * move.size, *block[piece.dim + 1 :])
    if math.prod(block[: piece.dim]) * piece.outer > 1:
        opened = _split_shape(joined_shape, piece, move.size)
        front = piece.dim + 1
        value = _view(emit, value, (move.size, *opened[:front], *opened[front + 1 :]))
        order = [*range(1, front + 1), 0, *range(front + 1, len(opened))]
        value = _copy(emit, emit.call(aten.permute.default, value, order))
    value = _view(emit, value, joined_shape)
    return _narrow(emit, value, joined_shape, piece, move.after[piece.dim])


def _separate_outer(shape: tuple[int, ...], piece: _Piece) -> tuple[int, tuple[int, ...]]:
    """Return the dim of a loop, and `shape`, with the steps outside of the loop, if any, as a separate dim."""
    if piece.outer == 1:
        return piece.dim, shape
    stretch = shape[piece.dim] // piece.outer
    return piece.dim + 1, (*shape[: piece.dim], piece.outer, stretch, *shape[piece.dim + 1 :])


def _pad(move: _Move, value: Any, shape: tuple[int, ...], piece: _Piece) -> tuple[Any, tuple[int, ...]]:
    """Pad every run of a loop that the axis does not divide with zeros; return the value and its shape."""
    if not piece.total:  # the axis divides it
        return value, shape
    dim, opened = _separate_outer(shape, piece)
    block = opened[dim] * piece.block // piece.total
    widths = [0] * (2 * (len(opened) - dim - 1)) + [0, block * move.size - opened[dim]]
    value = move.emit.call(aten.constant_pad_nd.default, _view(move.emit, value, opened), widths)
    shape = (*shape[: piece.dim], piece.outer * block * move.size, *shape[piece.dim + 1 :])
    return _view(move.emit, value, shape), shape


def _narrow(emit: Emitter, value: Any, shape: tuple[int, ...], piece: _Piece, size: int) -> Any:
    """Remove the padding of a loop's runs, so that `size` elements of its dim remain."""
    if shape[piece.dim] == size:
        return value
    dim, opened = _separate_outer(shape, piece)
    value = emit.call(aten.slice.Tensor, _view(emit, value, opened), dim, 0, size // piece.outer)
    value = value if math.prod(opened[:dim]) == 1 else _copy(emit, value)
    return _view(emit, value, (*shape[: piece.dim], size, *shape[piece.dim + 1 :]))


def _view(emit: Emitter, value: Any, shape: Sequence[int]) -> Any:
    return value if emit.shape(value) == tuple(shape) else emit.call(aten.view.default, value, list(shape))


def _contiguous(emit: Emitter, value: Any) -> Any:
    return value if isinstance(emit, KnowsStrides) and emit.is_contiguous(value) else _copy(emit, value)


def _copy(emit: Emitter, value: Any) -> Any:
    return emit.call(aten.clone.default, value, memory_format=torch.contiguous_format)


def shared_axis(emit: Emitter, axis: int, shape: tuple[int, ...]) -> EmitterWithShares | None:
    """Return the emitter if it has shares and a dim of the local shape is a share on this axis; else None."""
    if not isinstance(emit, EmitterWithShares) or emit.shared.axis != axis:
        return None
    return emit if emit.shared.is_shared(emit.shape_with_shares(shape)) else None


def gather_shares(emit: Emitter, shares: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return the shares of all ranks, concatenated along a dim.

    Args:
        emit: emits the operators.
        shares: the same emitter.
        value: this rank's share.
        shape: its shape.
        dim: the shared dim.
    """
    shared = shares.shared
    # Elements of the dim per element of the shared size.
    steps = shares.shape_with_shares(shape)[dim].expr / shared.own_share  # type: ignore[attr-defined]
    # Collectives take equal parts: every rank pads its share to the largest one.
    padding = shares.share(sympy.expand(steps * (shared.largest_share - shared.own_share)))
    widths = [0] * (2 * (len(shape) - dim - 1)) + [0, padding]
    value = emit.call(aten.view.default, value, list(shape))
    value = emit.call(aten.constant_pad_nd.default, value, widths)
    padded = emit.shape(value)
    value = collective(emit, collectives.all_gather_into_tensor.default, value, shared.ranks, axis=shared.axis)
    value = emit.call(aten.view.default, value, [shared.ranks, *padded])
    parts = []
    for rank in range(shared.ranks):
        part = emit.call(aten.select.int, value, 0, rank)
        length = shares.share(steps * shared.share_of_rank(rank))
        parts.append(emit.call(aten.slice.Tensor, part, dim, 0, length))
    return emit.call(aten.cat.default, parts, dim)


def cut_share(emit: Emitter, shares: EmitterWithShares, value: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return this rank's share of a whole tensor of `shape`; other arguments as for `gather_shares`."""
    shared = shares.shared
    steps = shape[dim].expr / shared.whole  # type: ignore[attr-defined]
    value = emit.call(aten.view.default, value, list(shape))
    # By indices, not by a slice, since the start differs between ranks.
    places = emit.call(aten.arange.default, shares.share(steps * shared.own_share), device=emit.device(value))
    places = emit.call(aten.add.Tensor, places, shares.share(steps * shared.share_before))
    return emit.call(aten.index_select.default, value, dim, places)
