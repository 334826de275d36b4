"""Factory operators: tensors from no operands, or from another tensor's shape.

A constant tensor is made at its local size. A tensor whose elements depend on their positions is made from the
positions that a rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import (
    aten,
    factor_names,
    if_sharded,
    numbered_dims,
    positions,
    reshape_along,
    result_dtype,
    run_resized,
    same_dims_rule,
)
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule, build


def _factory_rule(
    call: OpCall, local: LocalProgram = LocalCall.run, *, whole: bool = False, contiguous: bool = False
) -> Rule:
    """A result without operands, with one factor per dim."""
    sizes = numbered_dims(call.result.shape)
    return build(
        sizes,
        [],
        [list(sizes)],
        whole=sizes if whole else (),
        contiguous=sizes if contiguous else (),
        local=local if sizes else None,
        uneven=True,
    )


rule_maker(
    *("aten.zeros", "aten.ones", "aten.full", "aten.empty.memory_format", "aten.scalar_tensor"),
    local=run_resized("size"),
)(_factory_rule)


@rule_maker("aten.empty_strided", "aten.empty_permuted")
def _empty(call: OpCall) -> Rule:
    """Empty tensors; a shard is contiguous, since the call's strides are those of the whole tensor."""

    def local(program: LocalCall) -> Any:
        return program.emit.empty(list(program.result_shape()), dtype=call.result.dtype, device=program.emit.home)

    return _factory_rule(call, local)


rule(["aten.zeros_like", "aten.zero"], "... -> ...", linear="0")
rule(["aten.ones_like", "aten.full_like", "aten.empty_like"], "... -> ...")


@rule_maker("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")
def _new(call: OpCall) -> Rule:
    """Only the dtype of the operand matters: dims of equal size are sharded alike; a variant shards them freely."""
    pairs = zip(call.operands[0].shape, call.result.shape, strict=False)
    alike = {dim for dim, (size, new_size) in enumerate(pairs) if size == new_size}
    rule = _new_rule(call, alike)
    return replace(rule, variants=(_new_rule(call, set()),)) if alike else rule


def _new_rule(call: OpCall, alike: set[int]) -> Rule:
    """Operand and result share the dims `alike`; the operand's other factors do not occur in the result."""
    shape, sizes = call.operands[0].shape, numbered_dims(call.result.shape)
    names = [f"d{dim}" if dim in alike else f"operand{dim}" for dim in range(len(shape))]
    unshared = factor_names("operand", len(shape))
    return build(
        sizes | dict(zip(names, shape, strict=True)),
        [names],
        [list(sizes)],
        # The result does not depend on the operand's elements, so it is not partial however these are split.
        reductions=dict.fromkeys(unshared, (None,)),
        linear=[{0}] if call.name == "aten::new_zeros" else [],
        local=_local_new_empty if call.op == aten.new_empty_strided.default else run_resized("size"),
        uneven=True,
        fill=dict.fromkeys(unshared),
    )


def _local_new_empty(call: LocalCall) -> Any:
    # A shard is contiguous: the call's strides are those of the whole tensor.
    return call.operands[0].new_empty(list(call.result_shape()))


@rule_maker("aten.arange")
def _arange(call: OpCall) -> Rule:
    return _factory_rule(call, _local_arange, contiguous=True)


@rule_maker("aten.linspace")
def _linspace(call: OpCall) -> Rule | None:
    """No rule for bounds that are tensors; integers are whole, since rounding depends on the kernel."""
    if call.operands or call.results[0] is None:
        return None
    if not call.result.dtype.is_floating_point:
        return _factory_rule(call, whole=True)
    return _factory_rule(call, _local_linspace, contiguous=True)


@if_sharded("d0")
def _local_arange(call: LocalCall) -> Any:
    """start + step * position."""
    names = call.call.argument_names
    start, step = (call.arg(name) if name in names else default for name, default in (("start", 0), ("step", 1)))
    counted = positions(call, "d0", call.result_shape()[0], call.emit.home)
    if isinstance(start, float) or isinstance(step, float):
        # Torch counts in double precision, too.
        counted = counted.to(torch.float64)
    return (counted * step + start).to(result_dtype(call))


@if_sharded("d0")
def _local_linspace(call: LocalCall) -> Any:
    """Count from the start in the first half, and from the end in the second, as torch does."""
    start, end, steps = call.arg("start"), call.arg("end"), call.arg("steps")
    step = (end - start) / (steps - 1)
    place = positions(call, "d0", call.result_shape()[0], call.emit.home)
    wide = place.to(torch.float64)
    ahead, back = wide * step + start, end - (steps - 1 - wide) * step
    return call.emit.where(place < steps // 2, ahead, back).to(result_dtype(call))


@rule_maker("aten.eye")
def _eye(call: OpCall) -> Rule:
    return _factory_rule(call, _local_eye, contiguous=True)


@if_sharded("d0", "d1")
def _local_eye(call: LocalCall) -> Any:
    # Compare rows and columns: where the diagonal crosses a shard differs from rank to rank.
    rows, columns = _rows_and_columns(call, call.result_shape(), call.emit.home)
    return rows.eq(columns).to(result_dtype(call))


@rule_maker(
    *("aten.logspace", "aten.tril_indices", "aten.triu_indices", "aten.range"),
    *(f"aten.{kind}_window" for kind in ("bartlett", "blackman", "hamming", "hann", "kaiser")),
)
def _constant(call: OpCall) -> Rule | None:
    """Small tables without operands, made whole; slicing a constant costs nothing."""
    return None if call.operands else _factory_rule(call, whole=True)


# Triangles and diagonals of matrices.
#
# Row and column tell whether an element is in a triangle: a rank counts from the start of its stretch of either.


@rule_maker("aten.tril", "aten.triu")
def _triangle(call: OpCall) -> Rule:
    return same_dims_rule(call, contiguous=_matrix_dims(call), linear=[{0}], local=_local_triangle, uneven=True)


def _matrix_dims(call: OpCall) -> list[str]:
    """Names of the dims of rows and columns."""
    return list(numbered_dims(call.operands[0].shape))[-2:]


@if_sharded(by=_matrix_dims)
def _local_triangle(call: LocalCall) -> Any:
    (matrix,), diagonal = call.operands, call.arg("diagonal")
    rows, columns = _rows_and_columns(call, call.operand_shape(0), matrix.device)
    distance = columns - rows
    outside = distance > diagonal if call.call.name == "aten::tril" else distance < diagonal
    return matrix.masked_fill(outside, 0)


def _rows_and_columns(call: LocalCall, shape: Sequence[int], device: torch.device) -> list[Any]:
    """Global row and column indices of a rank's elements, each broadcastable to them."""
    return [
        reshape_along(positions(call, f"d{len(shape) - 2 + place}", shape[-2 + place], device), place, 2)
        for place in (0, 1)
    ]


@rule_maker("aten.trace")
def _trace(call: OpCall) -> Rule:
    """The sum of the diagonal, partial over every sharded dim."""
    sizes = numbered_dims(call.operands[0].shape)
    return build(sizes, [list(sizes)], [[]], contiguous=sizes, linear=[{0}], local=_local_trace, uneven=True)


@if_sharded("d0", "d1")
def _local_trace(call: LocalCall) -> Any:
    (matrix,) = call.operands
    rows, columns = _rows_and_columns(call, call.operand_shape(0), matrix.device)
    return matrix.masked_fill((columns - rows).ne(0), 0).sum()


@rule_maker("aten.diagonal", "aten.diagonal_backward", "aten.diagonal_scatter", "aten.diag_embed")
def _diagonal(call: OpCall) -> Rule:
    """The two dims must be whole, and so must the diagonal, the last dim of what is extracted or written."""
    name = call.name
    gives_matrices = name in ("aten::diagonal_backward", "aten::diag_embed")  # matrices from diagonals
    full = call.result if gives_matrices else call.operands[0]
    thin = call.result if name == "aten::diagonal" else call.operands[-1]
    crossed = [call.arg("dim1") % len(full.shape), call.arg("dim2") % len(full.shape)]
    sizes = numbered_dims(full.shape) | {"diagonal": thin.shape[-1]}
    long = factor_names("d", len(full.shape))
    short = [dim for place, dim in enumerate(long) if place not in crossed] + ["diagonal"]
    whole = [*(long[dim] for dim in crossed), "diagonal"]
    if name == "aten::diagonal_backward":
        local = run_resized("input_sizes")
        return build(sizes, [short], [long], whole=whole, linear=[{0}], local=local, uneven=True)
    if name == "aten::diag_embed":
        return build(sizes, [short], [long], whole=whole, linear=[{0}])
    if name == "aten::diagonal_scatter":
        return build(sizes, [long, short], [long], whole=whole, linear=[{0, 1}])
    return build(sizes, [long], [short], whole=whole, linear=[{0}], free=True)
