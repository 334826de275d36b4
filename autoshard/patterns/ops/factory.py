"""Operators that make tensors out of nothing, or out of another tensor's shape.

A tensor that is the same everywhere is made at its local size. One whose elements follow from their positions is made
where it is needed, from the positions that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten, cast, result_dtype
from autoshard.patterns.ops._positions import positions, reshape_along
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule


def _factory_rule(call: OpCall, local: LocalProgram, **options: Any) -> Rule:
    """A result without operands, with one factor per dim."""
    (result,) = call.results
    assert result is not None
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    options = {name: list(sizes) for name, wanted in options.items() if wanted}
    return build(sizes, [], [[[name] for name in sizes]], local=local if sizes else None, uneven=True, **options)


@rule_maker("aten.zeros", "aten.ones", "aten.full", "aten.empty.memory_format", "aten.scalar_tensor")
def _full(call: OpCall) -> Rule:
    return _factory_rule(call, lambda program: program.run(size=list(program.result_shape())))


@rule_maker("prims.full", "prims.scalar_tensor")
def _prims_full(call: OpCall) -> Rule:
    return _factory_rule(call, lambda program: program.run(shape=list(program.result_shape())))


@rule_maker("aten.empty_strided", "aten.empty_permuted", "prims.empty_strided", "prims.empty_permuted")
def _empty(call: OpCall) -> Rule:
    """Empty tensors; a shard is row-major, since the strides in the call are those of the whole tensor."""
    return _factory_rule(call, _local_empty)


def _local_empty(call: LocalCall) -> Any:
    shape, device = list(call.result_shape()), call.emit.home
    return call.emit.empty(shape, dtype=result_dtype(call), device=device)


rule(["aten.zeros_like", "aten.zero"], "... -> ...", linear="0")
rule(["aten.ones_like", "aten.full_like", "aten.empty_like", "prims.full_like"], "... -> ...")


@rule_maker("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")
def _new(call: OpCall) -> Rule:
    """Only the dtype of the operand matters: dims of equal size lie alike, or in any way."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    alike = {dim for dim, size in enumerate(operand.shape[: len(result.shape)]) if result.shape[dim] == size}
    return _new_rule(call, alike, [_new_rule(call, set(), ())] if alike else ())


def _new_rule(call: OpCall, alike: set[int], variants: Sequence[Rule]) -> Rule:
    """Operand and result share the dims `alike`; what else the operand is split by, the result does not have."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    names = [f"d{dim}" if dim in alike else f"operand{dim}" for dim in range(len(operand.shape))]
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)} | dict(zip(names, operand.shape, strict=True))
    target = [[f"d{dim}"] for dim in range(len(result.shape))]
    unshared = {f"operand{dim}": (None,) for dim in range(len(operand.shape))}
    linear = [{0}] if call.op._schema.name == "aten::new_zeros" else []
    dims = [[name] for name in names]
    fill = dict.fromkeys(unshared)
    return build(
        sizes,
        [dims],
        [target],
        reductions=unshared,
        linear=linear,
        local=_local_new,
        uneven=True,
        fill=fill,
        variants=variants,
    )


def _local_new(call: LocalCall) -> Any:
    if call.call.op == aten.new_empty_strided.default:  # strides are those of the whole tensor
        return call.emit.new_empty(call.operands[0], list(call.result_shape()))
    return call.run(size=list(call.result_shape()))


@rule_maker("aten.arange", "prims.iota")
def _arange(call: OpCall) -> Rule:
    return _factory_rule(call, _local_arange, contiguous=True)


@rule_maker("aten.linspace")
def _linspace(call: OpCall) -> Rule | None:
    """Bounds that are tensors are not looked at; integers, which are rounded as the kernel likes, are made whole."""
    if call.operands or call.results[0] is None:
        return None
    split = call.results[0].dtype.is_floating_point
    return (
        _factory_rule(call, _local_linspace, contiguous=True)
        if split
        else _factory_rule(call, LocalCall.run, whole=True)
    )


def _local_arange(call: LocalCall) -> Any:
    """start + step * position, where a shard is asked for."""
    if not call.axes("d0"):
        return call.run()
    names = [argument.name for argument in call.call.op._schema.arguments]
    start, step = (call.arg(name) if name in names else default for name, default in (("start", 0), ("step", 1)))
    counted = positions(call, "d0", call.result_shape()[0], call.emit.home)
    if isinstance(start, float) or isinstance(step, float):
        counted = cast(call, counted, torch.float64)  # torch counts in double precision, too
    counted = counted * step + start
    return cast(call, counted, result_dtype(call))


def _local_linspace(call: LocalCall) -> Any:
    """Counted from the start in the first half, and from the end in the second, as torch does."""
    if not call.axes("d0"):
        return call.run()
    emit, steps = call.emit, call.arg("steps")
    start, end = call.arg("start"), call.arg("end")
    step = (end - start) / (steps - 1)
    place = positions(call, "d0", call.result_shape()[0], call.emit.home)
    wide = cast(call, place, torch.float64)
    ahead = wide * step + start
    left = steps - 1 - wide
    back = end - left * step
    first_half = place < steps // 2
    return cast(call, emit.where(first_half, ahead, back), result_dtype(call))


@rule_maker("aten.eye")
def _eye(call: OpCall) -> Rule:
    return _factory_rule(call, _local_eye, contiguous=True)


def _local_eye(call: LocalCall) -> Any:
    if not call.axes("d0") and not call.axes("d1"):
        return call.run()
    shape, device = call.result_shape(), call.emit.home
    rows, columns = (reshape_along(call, positions(call, f"d{dim}", shape[dim], device), dim, 2) for dim in (0, 1))
    return cast(call, call.emit.eq(rows, columns), result_dtype(call))


@rule_maker(
    "aten.logspace",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.range",
    "aten.bartlett_window",
    "aten.blackman_window",
    "aten.hamming_window",
    "aten.hann_window",
    "aten.kaiser_window",
)
def _constant(call: OpCall) -> Rule | None:
    """Small tables that nothing depends on: made whole; slicing a constant costs nothing."""
    return None if call.operands else _factory_rule(call, LocalCall.run, whole=True)


# Triangles and diagonals of matrices.
#
# Whether an element lies in a triangle follows from its row and column: a rank that holds a stretch of either counts
# from where that stretch begins.


@rule_maker("aten.tril", "aten.triu")
def _triangle(call: OpCall) -> Rule:
    sizes = {f"d{dim}": size for dim, size in enumerate(call.operands[0].shape)}
    named = [[name] for name in sizes]
    last = list(sizes)[-2:]
    return build(sizes, [named], [named], contiguous=last, linear=[{0}], local=_local_triangle, uneven=True)


def _local_triangle(call: LocalCall) -> Any:
    shape = call.operand_shape(0)
    ndim = len(shape)
    if not call.axes(f"d{ndim - 2}") and not call.axes(f"d{ndim - 1}"):
        return call.run()
    distance, diagonal = _columns_less_rows(call, ndim - 2, ndim - 1, shape), call.arg("diagonal")
    outside = distance > diagonal if call.call.op._schema.name == "aten::tril" else distance < diagonal
    return call.emit.masked_fill(call.operands[0], outside, 0)


def _columns_less_rows(call: LocalCall, row: int, column: int, shape: tuple[int, ...]) -> Any:
    """For every element of the local matrix, its column less its row in the whole one."""
    device = call.operands[0].device
    rows, columns = (
        reshape_along(call, positions(call, f"d{dim}", shape[dim], device), place, 2)
        for place, dim in enumerate((row, column))
    )
    return columns - rows


@rule_maker("aten.trace")
def _trace(call: OpCall) -> Rule:
    """The sum of the diagonal, of which every shard holds a part."""
    rows, columns = call.operands[0].shape
    sizes = {"d0": rows, "d1": columns}
    return build(sizes, [[["d0"], ["d1"]]], [[]], contiguous=sizes, linear=[{0}], local=_local_trace, uneven=True)


def _local_trace(call: LocalCall) -> Any:
    if not call.axes("d0") and not call.axes("d1"):
        return call.run()
    emit, (matrix,) = call.emit, call.operands
    aside = emit.ne(_columns_less_rows(call, 0, 1, call.operand_shape(0)), 0)
    return emit.sum(emit.masked_fill(matrix, aside, 0))


@rule_maker("aten.diagonal", "aten.diagonal_backward", "aten.diagonal_scatter")
def _diagonal(call: OpCall) -> Rule:
    """The two dims must be whole, and so must the diagonal, which is the last dim of what is taken or put back."""
    backward = call.op._schema.name == "aten::diagonal_backward"
    full = call.results[0] if backward else call.operands[0]
    thin = call.operands[-1] if len(call.operands) == 2 or backward else call.results[0]
    assert full is not None
    assert thin is not None
    ndim = len(full.shape)
    crossed = {call.arg("dim1") % ndim, call.arg("dim2") % ndim}
    sizes = {f"d{dim}": size for dim, size in enumerate(full.shape)} | {"diagonal": thin.shape[-1]}
    long = [[f"d{dim}"] for dim in range(ndim)]
    short = [names for dim, names in enumerate(long) if dim not in crossed] + [["diagonal"]]
    whole = [f"d{dim}" for dim in crossed] + ["diagonal"]
    if backward:
        return build(sizes, [short], [long], whole=whole, linear=[{0}], local=_local_diagonal_backward, uneven=True)
    if len(call.operands) == 2:
        return build(sizes, [long, short], [long], whole=whole, linear=[{0, 1}])
    return build(sizes, [long], [short], whole=whole, linear=[{0}], free=True)


def _local_diagonal_backward(call: LocalCall) -> Any:
    return call.run(input_sizes=list(call.result_shape()))


@rule_maker("aten.diag_embed")
def _diag_embed(call: OpCall) -> Rule:
    """The last dim becomes the diagonal of two, all of which must be whole."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    ndim = len(result.shape)
    crossed = {call.arg("dim1") % ndim, call.arg("dim2") % ndim}
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)} | {"diagonal": operand.shape[-1]}
    target = [[f"d{dim}"] for dim in range(ndim)]
    source = [names for dim, names in enumerate(target) if dim not in crossed] + [["diagonal"]]
    return build(sizes, [source], [target], whole=[*(f"d{dim}" for dim in crossed), "diagonal"], linear=[{0}])
