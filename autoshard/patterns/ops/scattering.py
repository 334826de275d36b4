"""Scattering by index.

Where elements are added to the operand, the dims of the index may be sharded: results are partial sums, in which the
operand counts once. Where the dim written to is sharded, a rank writes within its stretch: other elements are zeroed if
they are added, and written to a spare row after the end if they overwrite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import argument_dim, aten, localize_index, numbered_dims, positions, reshape_along
from autoshard.patterns.ops.indexing import (
    advanced_indexing,
    aligned_dims,
    flat_dims,
    localize_flat_index,
    localize_indices,
)
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.padding import without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, build


def append_spare(value: Any, dims: Sequence[int]) -> Any:
    """The value with one more row after the end of every dim in `dims`."""
    ndim = len(value.shape)
    # `constant_pad_nd` takes (before, after) pairs from the last dim on.
    pad = [int(position % 2 == 1 and ndim - 1 - position // 2 in dims) for position in range(2 * ndim)]
    return value.constant_pad_nd(pad)


def drop_spare(value: Any, dims: Sequence[int]) -> Any:
    """The value without the last row of every dim in `dims`."""
    shape = value.shape
    for dim in dims:
        value = value.slice(dim, 0, shape[dim] - 1)
    return value


def _write_to_spare(call: LocalCall, index: Any, name: str, dim: int, *rest: Any) -> Any:
    """Run an operator that overwrites along a sharded dim: other ranks' indices refer to a spare row."""
    stretch = call.operand_shape(0)[dim]
    place, _ = localize_index(call, index, name, stretch, stretch)
    written = call.run(operands=[append_spare(call.operands[0], [dim]), place, *rest])
    return drop_spare(written, [dim])


# One index along one dim.


@rule_maker("aten.index_add", adds=True)
@rule_maker("aten.index_copy", "aten.index_fill", "aten.index_reduce", adds=False)
def _write_rows_rule(call: OpCall, adds: bool) -> Rule | None:
    """Rows of the third operand, or a number, are written to the rows in the index."""
    operand, index, *rest = call.operands
    rows = rest[0] if rest and rest[0].shape else None
    if not operand.shape or not index.shape or (rows is not None and len(rows.shape) != len(operand.shape)):
        return None
    sizes = numbered_dims(operand.shape)
    dims = list(sizes)
    name = dims[call.arg("dim")]
    linear: list[set[int]] = []
    # A reduction may be a product or a maximum; a number other than zero would be added once per term.
    if call.op is not aten.index_reduce.default:
        linear = [{0, 2}] if rest else [{0}] if call.arg("value") == 0 else []
    written = [] if rows is None else ["index" if dim == name else dim for dim in dims]
    return build(
        sizes | {"index": index.shape[0]},
        [dims, ["index"], *(written for _ in rest)],
        [dims],
        # Of rows overwriting one row, one device keeps the last, so the index must be whole.
        whole=[] if adds else ["index"],
        contiguous=[name],
        linear=linear,
        local=_add_rows if adds else _write_rows,
        uneven=True,
        fill={"index": 0.0} if adds else {},
    )


def _add_rows(call: LocalCall) -> Any:
    # The results are summed over ranks: the operand counts once.
    values = keep_on_first_rank(call, 0, ["index"])
    shape = call.operand_shape(0)
    dim = argument_dim(call, len(shape))
    if call.axes(f"d{dim}"):
        values[1], outside = localize_index(call, values[1], f"d{dim}", shape[dim])
        values[2] = values[2].masked_fill(reshape_along(outside, dim, len(shape)), 0)
    return call.run(operands=values)


def _write_rows(call: LocalCall) -> Any:
    dim = argument_dim(call, len(call.operand_shape(0)))
    if not call.axes(f"d{dim}"):
        return call.run()
    _, index, *rest = call.operands
    return _write_to_spare(call, index, f"d{dim}", dim, *rest)


# An index for every element.


def _element_rule(
    call: OpCall, local: Callable[[LocalCall], Any], *, kind: str | None = None, linear: Sequence[set[int]] = ()
) -> Rule | None:
    """Elements are written to the positions in an index of their shape.

    Args:
        kind: kind of partial result where the index is sharded; None where its elements must be whole.
    """
    operand = call.operands[0]
    if not operand.shape or any(len(meta.shape) != len(operand.shape) for meta in call.operands):
        return None
    sizes, whole, dims = aligned_dims(call.operands, argument_dim(call, len(operand.shape)))
    return build(
        sizes,
        dims,
        [dims[0]],
        whole=whole if kind else [*whole, "index"],
        contiguous=["indexed"],
        reductions={"index": (kind,)} if kind else None,
        linear=linear,
        local=local,
        uneven=True,
        fill={"index": None} if kind else {},
    )


@rule_maker("aten.scatter_add")
def _scatter_add(call: OpCall) -> Rule | None:
    return _element_rule(call, _add_elements, kind="sum", linear=[{0, 2}])


@rule_maker("aten.scatter.src", "aten.scatter.value")
def _scatter(call: OpCall) -> Rule | None:
    by_zero = len(call.operands) == 2 and call.arg("value") == 0
    linear = [{0, 2}] if len(call.operands) == 3 else [{0}] if by_zero else []
    return _element_rule(call, _write_elements, linear=linear)


_KINDS = {"sum": "sum", "add": "sum", "amax": "max", "amin": "min"}
"""Reductions of scattered elements as kinds of partial results."""


@rule_maker("aten.scatter_reduce", "aten.scatter.reduce", "aten.scatter.value_reduce")
def _scatter_reduce(call: OpCall) -> Rule | None:
    """The operand's elements take part: once in a sum, any number of times in a maximum."""
    includes_self = call.name != "aten::scatter_reduce" or call.arg("include_self")
    # Without `include_self`, only elements that are written to lose their value: no reduction of shards knows which.
    kind = _KINDS.get(call.arg("reduce")) if includes_self else None
    if kind == "sum" and len(call.operands) == 3:
        return _element_rule(call, _add_elements, kind=kind, linear=[{0, 2}])
    return _element_rule(call, _write_elements, kind=kind if kind != "sum" else None)


def _add_elements(call: LocalCall) -> Any:
    values = keep_on_first_rank(call, 0, ["index"])
    values[2] = without_padding(call, 2, values[2], ["index"], 0.0)
    if call.axes("indexed"):
        shape = call.operand_shape(0)
        whole_source = values[2].shape != values[1].shape
        values[1], outside = localize_index(call, values[1], "indexed", shape[argument_dim(call, len(shape))])
        if whole_source:  # the index covers a part of the source, from the start of every dim
            for dim, size in enumerate(values[1].shape):
                values[2] = values[2].slice(dim, 0, size)
        values[2] = values[2].masked_fill(outside, 0)
    return call.run(operands=values)


def _write_elements(call: LocalCall) -> Any:
    target, index, *rest = call.operands
    if rest and call.axes("index"):  # of extremes: the infinity is neutral
        least = math.inf if call.arg("reduce") == "amin" else -math.inf
        rest = [without_padding(call, 2, rest[0], ["index"], least)]
    if not call.axes("indexed"):
        return call.run(operands=[target, index, *rest])
    return _write_to_spare(call, index, "indexed", argument_dim(call, len(call.operand_shape(0))), *rest)


# Advanced indices.


@rule_maker("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: OpCall) -> Rule | None:
    """The dims of the index are contracted if values are added, and whole if values overwrite."""
    dims, values = advanced_indexing(call), call.operands[-1]
    if dims is None:
        return _put_by_mask(call)
    if len(values.shape) > len(dims.picked_dims):
        return None
    accumulate = call.arg("accumulate")
    added_dims = dims.broadcast(values, dims.picked_dims)

    def local_accumulate(program: LocalCall) -> Any:
        indices, outside = localize_indices(program, dims)
        target, *_, added = keep_on_first_rank(program, 0, dims.index_names)
        if outside is not None:
            added = added.masked_fill(outside, 0)
        return program.run(operands=[target, *indices, added])

    def local_overwrite(program: LocalCall) -> Any:
        split = [dim for dim in dims.indexed if program.axes(f"d{dim}")]
        indices, _ = localize_indices(program, dims, spare=True)
        target = append_spare(program.operands[0], split) if split else program.operands[0]
        return drop_spare(program.run(operands=[target, *indices, program.operands[-1]]), split)

    return build(
        dims.sizes,
        [dims.source, *dims.indices(), added_dims],
        [dims.source],
        whole=[] if accumulate else dims.index_names,
        contiguous=dims.names,
        linear=[{0, len(call.operands) - 1}],
        local=local_accumulate if accumulate else local_overwrite,
        uneven=True,
        # Padding of the indices refers to real rows, so the values added there must be padding, too, and zero.
        fill={name: 0.0 for name in dims.index_names if name in added_dims} if accumulate else {},
    )


def _put_by_mask(call: OpCall) -> Rule | None:
    """With a mask and the same values for all masked elements, every element is written independently."""
    indices, (target, *_, values) = call.arg("indices"), call.operands
    masks = [place for place, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or indices[masks[0]].dtype is not torch.bool:
        return None
    (first,) = masks
    sizes = numbered_dims(target.shape)
    names = list(sizes)
    end = first + len(indices[first].shape)
    # The masked elements are one dim of unknown size: values must be broadcast along it.
    picked: list[str | None] = [*names[:first], None, *names[end:]]
    aligned = picked[len(picked) - len(values.shape) :]
    if end == first or any(size != 1 for size, name in zip(values.shape, aligned, strict=True) if name is None):
        return None
    value_dims = [[] if size == 1 or name is None else name for size, name in zip(values.shape, aligned, strict=True)]
    return build(sizes, [names, names[first:end], value_dims], [names], linear=[{0, 2}])


@rule_maker("aten.put")
def _put(call: OpCall) -> Rule | None:
    """Elements by row-major position; the first dim may be sharded in stretches."""
    if call.operands[1].shape != call.operands[2].shape:
        return None
    dims, index_dims = flat_dims(call)
    target, indexed = list(dims), list(index_dims)
    accumulate = call.arg("accumulate")
    return build(
        dims | index_dims,
        [target, indexed, indexed],
        [target],
        # A stretch of the first dim is a stretch of row-major positions; of any other dim it is not. Of elements
        # overwriting one position, one device keeps the last, so the index must be whole.
        whole=target[1:] if accumulate else [*target[1:], *indexed],
        contiguous=["d0"],
        linear=[{0, 2}],
        local=_local_put,
        uneven=True,
        fill=dict.fromkeys(indexed, 0.0) if accumulate else {},
    )


def _local_put(call: LocalCall) -> Any:
    target, index, source = keep_on_first_rank(call, 0, list(flat_dims(call.call)[1]))
    if not call.axes("d0"):
        return call.run(operands=[target, index, source])
    shape = call.operand_shape(0)
    place, _ = localize_flat_index(call, math.prod(shape))
    flat = append_spare(target.reshape([-1]), [0])
    written = drop_spare(call.run(operands=[flat, place, source]), [0])
    return written.reshape(list(shape))


# Masked scatter: elements of a source fill the masked positions in order.
#
# The number of masked positions before a position decides which element it gets: the mask must be whole, and everything
# else may be sharded.


@rule_maker("aten.masked_scatter", "aten.masked_scatter_backward")
def _masked_scatter(call: OpCall) -> Rule | None:
    """`self` with the elements of `source` in the masked positions; or, backward, the gradient of the source.

    A shard of the incoming gradient gives a partial sum: its own elements, and zeros elsewhere.
    """
    backward = call.op is aten.masked_scatter_backward.default
    target, mask, *_ = call.operands
    source = call.result if backward else call.operands[2]
    # No rule where the target or gradient is broadcast to the mask: the source then fills more elements than it has.
    filled = torch.broadcast_shapes(target.shape, mask.shape) if backward else call.result.shape
    if filled != target.shape or (not backward and 0 in source.shape):
        return None
    dims, masked = numbered_dims(target.shape), numbered_dims(mask.shape, "mask")
    source_dims = numbered_dims(source.shape, "source")
    tensors = [list(dims), list(masked), list(source_dims)]
    return build(
        dims | masked | source_dims,
        tensors[:2] if backward else tensors,
        tensors[2:] if backward else tensors[:1],
        whole=[*masked, *source_dims],
        contiguous=dims,
        linear=[{0}] if backward else [{0, 2}],
        local=_local_masked_scatter_backward if backward else _local_masked_scatter,
        uneven=True,
    )


def _local_masked_scatter(call: LocalCall) -> Any:
    shape = list(call.operand_shape(0))
    if shape == list(call.call.operands[0].shape):
        return call.run()
    # The operator would start a local mask with the first element, which may belong to another rank.
    emit, (target, mask, source) = call.emit, call.operands
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    source = source.reshape([-1])
    place = place.clamp(0, math.prod(call.call.operands[2].shape) - 1)
    return emit.where(held, source.take(place), target)


def _local_places(call: LocalCall, mask: Any, whole: Sequence[int], shape: Sequence[int]) -> tuple[Any, Any]:
    """For every local element, the number of masked positions before it, and whether it is masked.

    Padding after the end of a dim has the values of the dim's last element.
    """
    mask = mask.expand(list(whole))
    # Count over the whole mask, which every rank has, then slice the rank's stretches.
    places = (mask.reshape([-1]).cumsum(0) - 1).reshape(list(whole))
    for dim, size in enumerate(shape):
        if call.axes(f"d{dim}"):
            held_positions = positions(call, f"d{dim}", size, mask.device).clamp_max(whole[dim] - 1)
            places, mask = (value.index_select(dim, held_positions) for value in (places, mask))
    return places, mask


def _local_masked_scatter_backward(call: LocalCall) -> Any:
    emit, (gradient, mask) = call.emit, call.operands
    shape, result = list(call.operand_shape(0)), list(call.result_shape())
    count = math.prod(result)
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    # Elements that are not masked go to a spare element after the end.
    place = emit.where(held, place, count).clamp(None, count)
    spare = gradient.new_zeros([count + 1])
    picked = spare.scatter_add(0, place.reshape([-1]), gradient.reshape([-1]))
    return picked.slice(0, 0, count).reshape(result)
