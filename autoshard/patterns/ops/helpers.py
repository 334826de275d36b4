"""Helpers for rules: rules by the names of an operator's arguments, and short local programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from autoshard.operator_library import accumulation_dtype
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.rule import LocalProgram, OpCall, Rule, TensorMeta, build
from autoshard.specs.emitter import collectives

aten = torch.ops.aten


def operand_names(call: OpCall) -> tuple[str, ...]:
    """The schema names of the call's tensor operands, in the order of `OpCall.operands`."""
    schema = call.argument_names
    pairs = [*zip(schema, call.args, strict=False), *call.kwargs]
    return tuple(name for name, value in pairs if isinstance(value, TensorMeta))


def bind_named(
    call: OpCall,
    operands: Mapping[str, str],
    results: Sequence[str],
    *,
    linear: Iterable[Collection[str]] = (),
    **options: Any,
) -> Rule:
    """The rule of a call, with dims of operands by argument name.

    Args:
        call: the call on whole tensors.
        operands: argument name -> dims of the operand in the notation of rules; ignored for absent arguments.
        results: dims of the results; ignored where a result is no tensor.
        linear: sets of arguments in which the operator is jointly linear, without absent arguments.
        options: as in `notation.bind`.
    """
    names = operand_names(call)
    text = f"{', '.join(operands[name] for name in names)} -> {', '.join(results)}"
    sets = [frozenset(names.index(name) for name in group if name in names) for group in linear]
    return bind(text, call, linear=sets, **options)


def named_values(call: LocalCall) -> dict[str, Any]:
    """The local operands by argument name; those that the call does not pass are missing."""
    return dict(zip(operand_names(call.call), call.operands, strict=True))


def argument_dim(call: OpCall | LocalCall, ndim: int) -> int:
    """The argument `dim` as a non-negative number; 0 for a tensor without dims."""
    # Torch accepts dim 0 and -1 for a 0-d tensor.
    return int(call.arg("dim")) % ndim if ndim else 0


def factor_names(prefix: str, count: int) -> list[str]:
    """Names of several factors: `n0`, `n1`, ..."""
    return [f"{prefix}{index}" for index in range(count)]


def numbered_dims(shape: Sequence[int], prefix: str = "d") -> dict[str, int]:
    """Numbered factors for the dims of a tensor, with their sizes."""
    return dict(zip(factor_names(prefix, len(shape)), shape, strict=True))


def same_dims_rule(call: OpCall, whole: Iterable[int] = (), **options: Any) -> Rule:
    """The rule of an operator whose result has the dims of its operand.

    Args:
        call: the call on whole tensors.
        whole: indices of dims that must be whole, which may be negative; ignored for a tensor without dims.
        options: as in `build`.
    """
    sizes = numbered_dims(call.operands[0].shape)
    dims = list(sizes)
    results = [None if meta is None else dims for meta in call.results]
    # A call may name dim 0 of a 0-d tensor.
    return build(sizes, [dims], results, whole=[dims[dim] for dim in whole if dims], **options)


def if_sharded(
    *names: str, by: Callable[[OpCall], Iterable[str]] | None = None
) -> Callable[[LocalProgram], LocalProgram]:
    """Decorate a local program that is needed only where a factor is sharded; else the operator runs unchanged.

    Args:
        names: the factors.
        by: returns further factors for a call.
    """

    def decorate(program: LocalProgram) -> LocalProgram:
        @functools.wraps(program)
        def local(call: LocalCall) -> Any:
            sharded = split_axes(call, [*names, *(by(call.call) if by is not None else ())])
            return program(call) if sharded else call.run()

        return local

    return decorate


@functools.cache
def run_resized(argument: str, first: int = 0) -> LocalProgram:
    """The program of an operator that takes the shape of its result, from dim `first` on, as an argument."""
    # Cached: equal rules are shared only if their programs are one object.
    return lambda call: call.run(**{argument: list(call.result_shape()[first:])})


def operands_for_sums(call: LocalCall) -> list[Any]:
    """The local operands in the dtypes in which they are accumulated."""
    return [value.to(accumulation_dtype(value.dtype)) for value in call.operands]


def split_axes(call: LocalCall, names: Iterable[str]) -> tuple[int, ...]:
    """The mesh axes that shard any of the factors `names`, in mesh order."""
    return tuple(sorted({axis for name in names for axis in call.axes(name)}))


def all_reduce_over(call: LocalCall, value: Any, names: Iterable[str], reduction: str = "sum") -> Any:
    """Reduce `value` over the axes that shard any of the factors `names`."""
    for name in names:
        value = call.all_reduce(value, name, reduction)
    return value


def all_reduce_stacked(call: LocalCall, values: Sequence[Any], names: Iterable[str]) -> list[Any]:
    """Sum several values of one shape over the axes that shard the factors `names`, with one collective per axis."""
    # Values with one number per row are small: the latency of each all-reduce dominates.
    emit = call.emit
    stacked = all_reduce_over(call, emit.stack(list(values)), names)
    return [stacked.select(0, index) for index in range(len(values))]


def result_dtype(call: LocalCall, result: int = 0) -> torch.dtype:
    """The dtype of a result."""
    meta = call.call.results[result]
    assert meta is not None
    return meta.dtype


def cast_results(call: LocalCall, values: Iterable[Any]) -> tuple[Any, ...]:
    """The results of a call in the dtypes of the operator's results; None stays None."""
    return tuple(None if value is None else value.to(result_dtype(call, index)) for index, value in enumerate(values))


def shape_of(call: OpCall, name: str) -> tuple[int, ...]:
    """The shape of the operand passed as the argument `name`."""
    meta = call.arg(name)
    assert isinstance(meta, TensorMeta), name
    return meta.shape


# Global positions, for local programs that hold a stretch of a dim.


def stretch_start(call: LocalCall, name: str, stretch: int) -> Any:
    """Return the first position of this rank's stretch of the factor `name`: a 0-d int64 value.

    Args:
        call: the call; the factor is sharded, and contiguous.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    # An explicit overload: a number would resolve to mul.Scalar, but unequal shares are found by mul.Tensor.
    return call.emit.call(aten.mul.Tensor, call.position(name), stretch)


def positions(call: LocalCall, name: str, stretch: int, device: torch.device | None) -> Any:
    """Global positions in the factor `name` of this rank's elements: int64 `[stretch]`."""
    counted = call.emit.arange(stretch, dtype=torch.int64, device=device)
    return counted + stretch_start(call, name, stretch) if call.axes(name) else counted


def local_ends(call: LocalCall, ends: Any, name: str, length: int) -> Any:
    """Ends of groups along the factor `name`, relative to this rank's stretch of `length` and clamped to it."""
    moved = ends - stretch_start(call, name, length)
    # The start is int64; grouped kernels take ends in their original dtype.
    return moved.clamp(0, length).to(ends.dtype)


def local_group_bounds(call: LocalCall, ends: Any, groups: int) -> tuple[Any, Any]:
    """Start of this rank's part of the factor `g` of consecutive groups, and the ends of its groups.

    Padding groups are empty, after the last group.

    Args:
        call: the call; `g` is sharded, and contiguous.
        ends: the end of every group.
        groups: number of groups of a rank.

    Returns:
        The start `[1]`, and the ends `[groups]` relative to it.
    """
    (count,) = ends.shape
    # Padding groups get the end of the last group, so that no index is out of range.
    held = positions(call, "g", groups, ends.device)
    bounds = ends.constant_pad_nd([1, 0])  # the first group starts at zero
    first = held.slice(0, 0, 1).clamp_max(count)
    start = bounds.index_select(0, first)
    last = ends.index_select(0, held.clamp_max(count - 1))
    return start, last - start


def reshape_along(value: Any, dim: int, ndim: int) -> Any:
    """Reshape a vector to `ndim` dims: all but `dim` have size 1."""
    shape = [1] * ndim
    shape[dim] = value.shape[0]
    return value.reshape(shape)


def all_gather_stacked(call: LocalCall, value: Any, name: str) -> Any:
    """Gather the values of all ranks along the factor `name`, in its order: `[share, *shape of value]`."""
    emit = call.emit
    # Collectives take contiguous tensors, and concatenate along dim 0.
    value = value.unsqueeze(0).clone(memory_format=torch.contiguous_format)
    # The first axis is the outermost, so it is gathered last.
    for axis in reversed(call.axes(name)):
        value = emit.collective(collectives.all_gather_into_tensor.default, value, call.mesh.sizes[axis], axis=axis)
    return value


def local_positions(call: LocalCall, index: Any, name: str, stretch: int) -> tuple[Any, Any]:
    """Positions relative to this rank's stretch of the factor `name`, and a mask of those outside of it.

    Args:
        call: the call; the factor is sharded, and contiguous.
        index: global positions, non-negative.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    place = index - stretch_start(call, name, stretch)
    before, behind = place < 0, place >= stretch
    return place, before.logical_or(behind)


def localize_index(call: LocalCall, index: Any, name: str, stretch: int, outside_at: int = 0) -> tuple[Any, Any]:
    """As `local_positions`, with positions outside replaced by `outside_at`."""
    place, outside = local_positions(call, index, name, stretch)
    return place.masked_fill(outside, outside_at), outside
