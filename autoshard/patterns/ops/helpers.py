"""Helpers of all files of rules: rules by the names of an operator's arguments, and short local programs."""

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
    """The rule of a call, its operands' dims given by the names of the arguments.

    Args:
        call: the call on whole tensors.
        operands: dims of the operands in the notation of rules, by argument name; those that the call does not
            pass are not looked at.
        results: dims of the results; not looked at where the call gives no tensor.
        linear: sets of arguments in which the operator is jointly linear; those that the call does not pass are
            left out.
        options: as in `notation.bind`.
    """
    names = operand_names(call)
    text = f"{', '.join(operands[name] for name in names)} -> {', '.join(results)}"
    sets = [frozenset(names.index(name) for name in group if name in names) for group in linear]
    return bind(text, call, linear=sets, **options)


def named_values(call: LocalCall) -> dict[str, Any]:
    """The local operands by argument name; operands that the call does not pass are absent."""
    return dict(zip(operand_names(call.call), call.operands, strict=True))


def argument_dim(call: OpCall | LocalCall, ndim: int) -> int:
    """The dim that the argument `dim` names, counted from the start; 0 for a tensor without dims."""
    # Torch takes 0 and -1 for the dim of a tensor that has none.
    return int(call.arg("dim")) % ndim if ndim else 0


def factor_names(prefix: str, count: int) -> list[str]:
    """Names of several factors: `n0`, `n1`, ..."""
    return [f"{prefix}{index}" for index in range(count)]


def numbered_dims(shape: Sequence[int], prefix: str = "d") -> dict[str, int]:
    """A factor for every dim of a tensor, by number, with its size."""
    return dict(zip(factor_names(prefix, len(shape)), shape, strict=True))


def same_dims_rule(call: OpCall, whole: Iterable[int] = (), **options: Any) -> Rule:
    """The rule of an operator that keeps the dims of its operand, of which those in `whole` must be whole.

    Args:
        call: the call on whole tensors.
        whole: numbers of dims, which may count from the end; a tensor without dims has none.
        options: as in `build`.
    """
    sizes = numbered_dims(call.operands[0].shape)
    dims = list(sizes)
    results = [None if meta is None else dims for meta in call.results]
    # A tensor without dims has none to be whole, though the call may name its dim 0.
    return build(sizes, [dims], results, whole=[dims[dim] for dim in whole if dims], **options)


def if_sharded(
    *names: str, by: Callable[[OpCall], Iterable[str]] | None = None
) -> Callable[[LocalProgram], LocalProgram]:
    """Decorate a local program that is needed where a factor is sharded; elsewhere the operator runs as it is.

    Args:
        names: the factors.
        by: gives further ones for a call.
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
    """The program of an operator that is told the shape of its result, from the dim `first` on, by an argument."""
    # Remembered: equal rules are shared only if their programs are one object.
    return lambda call: call.run(**{argument: list(call.result_shape()[first:])})


def operands_for_sums(call: LocalCall) -> list[Any]:
    """The local operands in the dtypes that sums of them are taken in."""
    return [value.to(accumulation_dtype(value.dtype)) for value in call.operands]


def split_axes(call: LocalCall, names: Iterable[str]) -> tuple[int, ...]:
    """Mesh axes that shard any of the factors `names`, in mesh order."""
    return tuple(sorted({axis for name in names for axis in call.axes(name)}))


def all_reduce_over(call: LocalCall, value: Any, names: Iterable[str], reduction: str = "sum") -> Any:
    """`value` reduced over the axes that shard any of the factors `names`."""
    for name in names:
        value = call.all_reduce(value, name, reduction)
    return value


def all_reduce_stacked(call: LocalCall, values: Sequence[Any], names: Iterable[str]) -> list[Any]:
    """Sums of several values of one shape over the axes that shard the factors `names`: one collective per axis."""
    # Values of one number per row are small: their all-reduces take the time of a message each, whatever their size.
    emit = call.emit
    stacked = all_reduce_over(call, emit.stack(list(values)), names)
    return [stacked.select(0, index) for index in range(len(values))]


def result_dtype(call: LocalCall, result: int = 0) -> torch.dtype:
    """Element type of a result."""
    meta = call.call.results[result]
    assert meta is not None
    return meta.dtype


def cast_results(call: LocalCall, values: Iterable[Any]) -> tuple[Any, ...]:
    """The results of a call in the element types that the operator gives them; None stays None."""
    return tuple(None if value is None else value.to(result_dtype(call, index)) for index, value in enumerate(values))


def shape_of(call: OpCall, name: str) -> tuple[int, ...]:
    """Shape of the operand that is passed as the argument `name`."""
    meta = call.arg(name)
    assert isinstance(meta, TensorMeta), name
    return meta.shape


# Positions in the whole tensor, for local programs that hold a stretch of one of its dims.


def stretch_start(call: LocalCall, name: str, stretch: int) -> Any:
    """Return the first position of this rank's stretch of the factor `name`: a 0-d int64 value.

    Args:
        call: the call; the factor is sharded, and contiguous.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    # By name: a number would take mul.Scalar, and an emitter of unequal shares reads starts off mul.Tensor.
    return call.emit.call(aten.mul.Tensor, call.position(name), stretch)


def positions(call: LocalCall, name: str, stretch: int, device: torch.device | None) -> Any:
    """Positions in the whole factor `name` of the elements that this rank holds: int64 `[stretch]`."""
    counted = call.emit.arange(stretch, dtype=torch.int64, device=device)
    return counted + stretch_start(call, name, stretch) if call.axes(name) else counted


def local_ends(call: LocalCall, ends: Any, name: str, length: int) -> Any:
    """Ends of groups along the factor `name`, counted in this rank's stretch of `length`: those outside are clamped."""
    moved = ends - stretch_start(call, name, length)
    # The start is int64; kernels of groups take ends in the dtype that they came in.
    return moved.clamp(0, length).to(ends.dtype)


def local_group_bounds(call: LocalCall, ends: Any, groups: int) -> tuple[Any, Any]:
    """Start of this rank's part of the factor `g`, groups that lie behind each other, and the ends of its groups.

    Groups that are padding are empty, and stand behind the last.

    Args:
        call: the call; `g` is sharded, and contiguous.
        ends: where every group ends.
        groups: how many groups a rank has.

    Returns:
        The start `[1]`, and the ends `[groups]`, counted from there.
    """
    (count,) = ends.shape
    # Groups that are padding take the last one's end, so that no index points behind `ends`.
    held = positions(call, "g", groups, ends.device)
    bounds = ends.constant_pad_nd([1, 0])  # the first group starts at zero
    first = held.slice(0, 0, 1).clamp_max(count)
    start = bounds.index_select(0, first)
    last = ends.index_select(0, held.clamp_max(count - 1))
    return start, last - start


def reshape_along(value: Any, dim: int, ndim: int) -> Any:
    """A vector as a tensor of `ndim` dims that lies along `dim`; all other dims have size one."""
    shape = [1] * ndim
    shape[dim] = value.shape[0]
    return value.reshape(shape)


def all_gather_stacked(call: LocalCall, value: Any, name: str) -> Any:
    """The values of all ranks that hold stretches of the factor `name`, in its order: `[share, *shape of value]`."""
    emit = call.emit
    # Collectives take contiguous tensors, and join them along dim 0.
    value = value.unsqueeze(0).clone(memory_format=torch.contiguous_format)
    # The first axis is the outermost: gathered last, its ranks come in the outer order.
    for axis in reversed(call.axes(name)):
        value = emit.collective(collectives.all_gather_into_tensor.default, value, call.mesh.sizes[axis], axis=axis)
    return value


def local_positions(call: LocalCall, index: Any, name: str, stretch: int) -> tuple[Any, Any]:
    """Positions in the factor `name` counted from the start of this rank's stretch, and which lie outside of it.

    Args:
        call: the call; the factor is sharded, and contiguous.
        index: positions in the whole factor, none negative.
        name: the factor.
        stretch: length of a rank's stretch.
    """
    place = index - stretch_start(call, name, stretch)
    before, behind = place < 0, place >= stretch
    return place, before.logical_or(behind)


def localize_index(call: LocalCall, index: Any, name: str, stretch: int, outside_at: int = 0) -> tuple[Any, Any]:
    """As `local_positions`, each position that lies outside replaced by `outside_at`."""
    place, outside = local_positions(call, index, name, stretch)
    return place.masked_fill(outside, outside_at), outside
