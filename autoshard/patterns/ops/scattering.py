"""Scattering by index.

Where elements are added into the result, the dims of the index may be sharded: they leave partial sums, to which what
is added to counts once. Where the dim that is written to is sharded, a rank writes what falls into its stretch: what
does not is made zero where elements are added, and goes to a spare row behind the end where they overwrite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._positions import localize_index, positions, reshape_along
from autoshard.patterns.ops.indexing import (
    advanced_indexing,
    aligned_dims,
    flat_dims,
    localize_flat_index,
    localize_indices,
    named_dims,
    with_index,
)
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.padding import without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def append_spare(call: LocalCall, value: Any, dims: Sequence[int]) -> Any:
    """The value with one more row behind the end of every dim in `dims`."""
    ndim = len(value.shape)
    # `constant_pad_nd` counts from the last dim, before and behind in turn.
    pad = [int(position % 2 == 1 and ndim - 1 - position // 2 in dims) for position in range(2 * ndim)]
    return call.emit.constant_pad_nd(value, pad)


def drop_spare(call: LocalCall, value: Any, dims: Sequence[int]) -> Any:
    """The value without the last row of every dim in `dims`."""
    shape = value.shape
    for dim in dims:
        value = call.emit.slice(value, dim, 0, shape[dim] - 1)
    return value


# One index along one dim -----------------------------------------------------------------------------------------


def _row_rule(call: OpCall, *, adds: bool, linear: Sequence[set[int]] = ()) -> Rule | None:
    """Rows of the third operand, or a number, are written to where the index says."""
    operand, index, *rest = call.operands
    rows = rest[0] if rest and rest[0].shape else None
    if not operand.shape or not index.shape or (rows is not None and len(rows.shape) != len(operand.shape)):
        return None
    dim = call.arg("dim") % len(operand.shape)
    source = [[name] for name in named_dims(operand)]
    written = [with_index(source, dim)] if rows is not None else [[]] * len(rest)
    return build(
        named_dims(operand) | {"index": index.shape[0]},
        [source, [["index"]], *written],
        [source],
        whole=[] if adds else ["index"],
        contiguous=[f"d{dim}"],
        linear=linear,
        local=_add_rows if adds else _write_rows,
        uneven=True,
        fill={"index": 0.0} if adds else {},
    )


@rule_maker("aten.index_add")
def _index_add(call: OpCall) -> Rule | None:
    return _row_rule(call, adds=True, linear=[{0, 2}])


@rule_maker("aten.index_copy")
def _index_copy(call: OpCall) -> Rule | None:
    return _row_rule(call, adds=False, linear=[{0, 2}])


@rule_maker("aten.index_fill")
def _index_fill(call: OpCall) -> Rule | None:
    by_tensor = len(call.operands) == 3
    return _row_rule(call, adds=False, linear=[{0, 2}] if by_tensor else [{0}] if call.arg("value") == 0 else [])


@rule_maker("aten.index_reduce")
def _index_reduce(call: OpCall) -> Rule | None:
    return _row_rule(call, adds=False)


def _add_rows(call: LocalCall) -> Any:
    # The ranks' results are added up: the operand counts once.
    values = keep_on_first_rank(call, 0, ["index"])
    shape = call.operand_shape(0)
    dim = call.arg("dim") % len(shape)
    if call.axes(f"d{dim}"):
        values[1], outside = localize_index(call, values[1], f"d{dim}", shape[dim])
        outside = reshape_along(call, outside, dim, len(shape))
        values[2] = call.emit.masked_fill(values[2], outside, 0)
    return call.run(operands=values)


def _write_rows(call: LocalCall) -> Any:
    shape = call.operand_shape(0)
    dim = call.arg("dim") % len(shape)
    if not call.axes(f"d{dim}"):
        return call.run()
    target, index, *rest = call.operands
    # An index of another rank's stretch becomes that of the spare row.
    place, _ = localize_index(call, index, f"d{dim}", shape[dim], shape[dim])
    written = call.run(operands=[append_spare(call, target, [dim]), place, *rest])
    return drop_spare(call, written, [dim])


# An index for every element --------------------------------------------------------------------------------------


def _element_rule(
    call: OpCall, local: Callable[[LocalCall], Any], *, kind: str | None = None, linear: Sequence[set[int]] = ()
) -> Rule | None:
    """Elements are written to where an index of their shape says.

    Args:
        kind: what shards of the index leave; None where the elements of the index must be whole.
    """
    operand = call.operands[0]
    if not operand.shape or any(len(meta.shape) != len(operand.shape) for meta in call.operands):
        return None
    sizes, whole, dims = aligned_dims(call.operands, call.arg("dim") % len(operand.shape))
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
    """The elements that were there before take part: once in a sum, any number of times in a maximum."""
    two = call.op._schema.name == "aten::scatter_reduce"
    kind = _KINDS.get(call.arg("reduce")) if not two or call.arg("include_self") else None
    if kind == "sum" and len(call.operands) == 3:
        return _element_rule(call, _add_elements, kind=kind, linear=[{0, 2}])
    return _element_rule(call, _write_elements, kind=kind if kind != "sum" else None)


def _add_elements(call: LocalCall) -> Any:
    values = keep_on_first_rank(call, 0, ["index"])
    values[2] = without_padding(call, 2, values[2], ["index"], 0.0)
    if call.axes("indexed"):
        shape = call.operand_shape(0)
        whole_source = values[2].shape != values[1].shape
        values[1], outside = localize_index(call, values[1], "indexed", shape[call.arg("dim") % len(shape)])
        if whole_source:  # the index covers a part of the source, from the start of every dim
            for dim, size in enumerate(values[1].shape):
                values[2] = call.emit.slice(values[2], dim, 0, size)
        values[2] = call.emit.masked_fill(values[2], outside, 0)
    return call.run(operands=values)


def _write_elements(call: LocalCall) -> Any:
    target, index, *rest = call.operands
    if rest and call.axes("index"):  # extremes, to which what is as far off as can be adds nothing
        least = math.inf if call.arg("reduce") == "amin" else -math.inf
        rest = [without_padding(call, 2, rest[0], ["index"], least)]
    if not call.axes("indexed"):
        return call.run(operands=[target, index, *rest])
    shape = call.operand_shape(0)
    dim = call.arg("dim") % len(shape)
    place, _ = localize_index(call, index, "indexed", shape[dim], shape[dim])
    written = call.run(operands=[append_spare(call, target, [dim]), place, *rest])
    return drop_spare(call, written, [dim])


# Advanced indices ------------------------------------------------------------------------------------------------


@rule_maker("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: OpCall) -> Rule | None:
    """The dims of the index are contracted if values are added up, and stay whole if values overwrite."""
    dims = advanced_indexing(call)
    if dims is None:
        return None
    values = call.operands[-1]
    if len(values.shape) > len(dims.picked_dims):
        return None
    accumulate = call.arg("accumulate")
    added_dims = dims.broadcast(values, dims.picked_dims)

    def local_accumulate(program: LocalCall) -> Any:
        indices, outside = localize_indices(program, dims)
        target, *_, added = keep_on_first_rank(program, 0, dims.index_names)
        if outside is not None:
            added = program.emit.masked_fill(added, outside, 0)
        return program.run(operands=[target, *indices, added])

    def local_overwrite(program: LocalCall) -> Any:
        split = [dim for dim in dims.indexed if program.axes(f"d{dim}")]
        indices, _ = localize_indices(program, dims, spare=True)
        target = append_spare(program, program.operands[0], split) if split else program.operands[0]
        return drop_spare(program, program.run(operands=[target, *indices, program.operands[-1]]), split)

    return build(
        dims.sizes,
        [dims.source, *dims.indices(), added_dims],
        [dims.source],
        whole=[] if accumulate else dims.index_names,
        contiguous=dims.names,
        linear=[{0, len(call.operands) - 1}],
        local=local_accumulate if accumulate else local_overwrite,
        uneven=True,
        # Padding of the indices points at what is there; what is added there must be padding too, and so be zero.
        fill=dict.fromkeys(_names_in(added_dims, dims.index_names), 0.0) if accumulate else {},
    )


def _names_in(dims: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(name in dim for dim in dims)]


@rule_maker("aten.put")
def _put(call: OpCall) -> Rule | None:
    """Elements by their row-major position, of which the first dim may be sharded in stretches."""
    operand, index, source = call.operands
    if index.shape != source.shape:
        return None
    sizes, target, indexed, whole = flat_dims(operand, index)
    accumulate = call.arg("accumulate")
    return build(
        sizes,
        [target, indexed, indexed],
        [target],
        whole=whole if accumulate else [*whole, *(name for dim in indexed for name in dim)],
        contiguous=["d0"],
        linear=[{0, 2}],
        local=_local_put,
        uneven=True,
        fill={name: 0.0 for dim in indexed for name in dim} if accumulate else {},
    )


def _local_put(call: LocalCall) -> Any:
    contracted = [f"index{dim}" for dim in range(len(call.call.operands[1].shape))]
    target, index, source = keep_on_first_rank(call, 0, contracted)
    if not call.axes("d0"):
        return call.run(operands=[target, index, source])
    emit, shape = call.emit, call.operand_shape(0)
    place, _ = localize_flat_index(call, math.prod(shape))
    flat = append_spare(call, emit.reshape(target, [-1]), [0])
    written = drop_spare(call, call.run(operands=[flat, place, source]), [0])
    return emit.reshape(written, list(shape))


# Elements that are taken one after the other to fill the places of a mask.
#
# The number of places of the mask before a place decides which element it gets: the mask must be whole, and everything
# else may be sharded.


@rule_maker("aten.masked_scatter")
def _masked_scatter(call: OpCall) -> Rule | None:
    """`self` with the elements of `source` in the places of the mask."""
    target, mask, source = call.operands
    if call.results[0] is None or call.results[0].shape != target.shape or not math.prod(source.shape):
        return None
    sizes = {f"d{dim}": size for dim, size in enumerate(target.shape)}
    dims = [[name] for name in sizes]
    masked, whole = _whole_dims("mask", mask.shape, sizes)
    source_dims, more = _whole_dims("source", source.shape, sizes)
    linear = [{0, 2}]
    return build(
        sizes,
        [dims, masked, source_dims],
        [dims],
        whole=[*whole, *more],
        contiguous=sizes,
        linear=linear,
        local=_local_masked_scatter,
        uneven=True,
    )


def _whole_dims(prefix: str, shape: Sequence[int], sizes: dict[str, int]) -> tuple[list[list[str]], list[str]]:
    """Dims of a tensor that must be whole, whose names and sizes are added to `sizes`; and these names."""
    names = [f"{prefix}{dim}" for dim in range(len(shape))]
    sizes |= dict(zip(names, shape, strict=True))
    return [[name] for name in names], names


def _local_masked_scatter(call: LocalCall) -> Any:
    shape = list(call.operand_shape(0))
    if shape == list(call.call.operands[0].shape):
        return call.run()
    emit, (target, mask, source) = call.emit, call.operands
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    source = emit.reshape(source, [-1])
    place = emit.clamp(place, 0, math.prod(call.call.operands[2].shape) - 1)
    return emit.where(held, emit.take(source, place), target)


def _local_places(call: LocalCall, mask: Any, whole: Sequence[int], shape: Sequence[int]) -> tuple[Any, Any]:
    """For every local element the number of places of the mask before it, and whether the mask holds it.

    Padding behind the end of a dim has the answers of the dim's last element.
    """
    emit = call.emit
    mask = emit.expand(mask, list(whole))
    places = emit.cumsum(emit.reshape(mask, [-1]), 0)
    places = emit.reshape(places - 1, list(whole))
    for dim, size in enumerate(shape):
        if call.axes(f"d{dim}"):
            held_positions = positions(call, f"d{dim}", size, mask.device)
            held_positions = emit.clamp_max(held_positions, whole[dim] - 1)
            places, mask = (emit.index_select(value, dim, held_positions) for value in (places, mask))
    return places, mask


@rule_maker("aten.masked_scatter_backward")
def _masked_scatter_backward(call: OpCall) -> Rule | None:
    """The gradient of the source: a shard of the incoming gradient gives its elements, and zeros for the others'."""
    gradient, mask = call.operands
    (result,) = call.results
    assert result is not None
    if mask.shape != gradient.shape:
        return None
    sizes = {f"d{dim}": size for dim, size in enumerate(gradient.shape)}
    dims = [[name] for name in sizes]
    masked, whole = _whole_dims("mask", mask.shape, sizes)
    source_dims, more = _whole_dims("source", result.shape, sizes)
    return build(
        sizes,
        [dims, masked],
        [source_dims],
        whole=[*whole, *more],
        contiguous=[name for names in dims for name in names],
        linear=[{0}],
        local=_local_masked_scatter_backward,
        uneven=True,
    )


def _local_masked_scatter_backward(call: LocalCall) -> Any:
    emit, (gradient, mask) = call.emit, call.operands
    shape, result = list(call.operand_shape(0)), list(call.result_shape())
    count = math.prod(result)
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    # What the mask does not hold goes to a spare element behind the end.
    place = emit.where(held, place, count)
    place = emit.clamp(place, None, count)
    spare = emit.new_zeros(gradient, [count + 1])
    flat = [emit.reshape(value, [-1]) for value in (place, gradient)]
    picked = emit.scatter_add(spare, 0, *flat)
    return emit.reshape(emit.slice(picked, 0, 0, count), result)
