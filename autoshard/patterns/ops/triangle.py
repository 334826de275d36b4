"""Triangles and diagonals of matrices.

Whether an element lies in a triangle follows from its row and column: a rank that holds a stretch of either counts from
where that stretch begins.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten
from autoshard.patterns.ops._positions import positions, reshape_along
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


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
    distance = _columns_less_rows(call, ndim - 2, ndim - 1, shape)
    lower = call.call.op._schema.name == "aten::tril"
    compare = aten.gt.Scalar if lower else aten.lt.Scalar
    outside = call.emit.call(compare, distance, call.arg("diagonal"))
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
