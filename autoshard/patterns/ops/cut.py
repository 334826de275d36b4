"""Operators that cut dims or put them together: slice, split, cat, and their backwards.

A dim of size N that is cut at some boundaries has the greatest common divisor g of N and the boundaries as an inner
factor that the cut leaves alone: the cut is one of the outer factor N / g. Sharding g keeps the operator local
(heads inside a fused projection, say); the outer factor can't be sharded. A slice that takes one element of every
`step` leaves alone the outer factor N / step instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.size import common_divisor

CUT = "cut"
"""The inner factor of the dim that is cut."""


def cut_rule(
    call: OpCall, dim: int, inner: int, *, linear: Sequence[set[int]] = (), local: Any = None, free: bool = False
) -> Rule:
    """Every tensor of the call has the same dims but for `dim`, of which `inner` is a common inner factor."""
    sizes: dict[str, int] = {CUT: inner}
    whole: list[str] = []

    def name_dims(place: str, meta: TensorMeta) -> list[list[str]]:
        dims = [[f"d{index}"] for index in range(len(meta.shape))]
        outer = f"{place}_parts"
        dims[dim] = [outer, CUT]
        sizes.update({f"d{index}": size for index, size in enumerate(meta.shape) if index != dim})
        sizes[outer] = meta.shape[dim] // inner
        whole.append(outer)
        if meta.shape[dim] == 0:
            whole.append(CUT)  # nothing is left that could be sharded
        return dims

    operands = [name_dims(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [
        None if meta is None else name_dims(f"result{position}", meta) for position, meta in enumerate(call.results)
    ]
    return build(sizes, operands, results, whole=whole, linear=linear, local=local, free=free, uneven=True)


def common_inner_size(*boundaries: int) -> int:
    """The inner factor that cuts at these boundaries leave alone; 1 where everything is empty."""
    return reduce(common_divisor, boundaries, 0) or 1


def _dim(call: OpCall, ndim: int) -> int:
    return int(call.arg("dim")) % ndim


def _bounds(call: OpCall, size: int) -> tuple[int, int]:
    """Start and end of a slice of a dim of `size`, as numbers from 0 to size."""
    start, end = call.arg("start"), call.arg("end")
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    return start, min(max(end + size if end < 0 else end, start), size)


def _slice_rule(call: OpCall, whole: TensorMeta, linear: Sequence[set[int]], free: bool) -> Rule:
    """A slice of `whole`, or the reverse; with a step that does not divide the dim, the dim stays whole."""
    dim = _dim(call, len(whole.shape))
    size = whole.shape[dim]
    start, end = _bounds(call, size)
    step = call.arg("step")
    if step == 1:
        return cut_rule(call, dim, common_inner_size(size, start, end), linear=linear, local=_local_slice, free=free)
    if start < step and size % step == 0 and end - start > size - step:
        return _strided_slice_rule(call, whole, dim, step, linear=linear, free=free)
    return cut_rule(call, dim, 1, linear=linear, free=free, local=_run_with_local_sizes)


def _strided_slice_rule(call: OpCall, whole: TensorMeta, dim: int, step: int, **options: Any) -> Rule:
    """One element of every `step`: the dim is (groups, step) in the whole tensor and (groups) in the slice."""
    sizes = {f"d{index}": size for index, size in enumerate(whole.shape)}
    sizes |= {CUT: sizes.pop(f"d{dim}") // step, "step": step}
    dims = [[CUT, "step"] if index == dim else [f"d{index}"] for index in range(len(whole.shape))]
    sliced = [[CUT] if index == dim else names for index, names in enumerate(dims)]

    def dims_of(meta: TensorMeta | None) -> list[list[str]]:
        return dims if meta is not None and meta.shape == whole.shape else sliced

    operands, results = [dims_of(meta) for meta in call.operands], [dims_of(meta) for meta in call.results]
    return build(sizes, operands, results, whole=["step"], local=_local_strided_slice, uneven=True, **options)


def _local_strided_slice(call: LocalCall) -> Any:
    """The same slice of the local dim, to its end."""
    backward = call.call.op._schema.name == "aten::slice_backward"
    shape = call.result_shape() if backward else call.operand_shape(0)
    whole = call.call.results[0] if backward else call.call.operands[0]
    assert whole is not None
    dim = _dim(call.call, len(shape))
    start, _ = _bounds(call.call, whole.shape[dim])
    return call.run(start=start, end=shape[dim], **({"input_sizes": list(shape)} if backward else {}))


def _run_with_local_sizes(call: LocalCall) -> Any:
    """The operator with its sizes made local, if it takes any."""
    names = [argument.name for argument in call.call.op._schema.arguments]
    return call.run(input_sizes=list(call.result_shape())) if "input_sizes" in names else call.run()


def _local_slice(call: LocalCall) -> Any:
    """The slice with start and end in the local dim."""
    backward = call.call.op._schema.name == "aten::slice_backward"
    whole = call.call.results[0] if backward else call.call.operands[0]
    assert whole is not None
    start, end = _bounds(call.call, whole.shape[_dim(call.call, len(whole.shape))])
    sizes = {"input_sizes": list(call.result_shape())} if backward else {}
    return call.run(start=_local_place(call, start), end=_local_place(call, end), **sizes)


def slice_backward_by_padding(call: LocalCall) -> Any:
    """`aten.slice_backward` by padding what was a slice of a dim with zeros, whatever the sizes of the other dims."""
    (value,), emit, step = call.operands, call.emit, call.arg("step")
    (whole,) = call.call.results
    assert whole is not None
    dim, ndim = _dim(call.call, len(whole.shape)), len(whole.shape)
    size, taken = call.result_shape()[dim], call.operand_shape(0)[dim]
    start, _ = _bounds(call.call, whole.shape[dim])

    def pad_dim(tensor: Any, dims_behind: int, before: int, behind: int) -> Any:
        return emit.constant_pad_nd(tensor, [0, 0] * dims_behind + [before, behind])

    if step == 1:
        start = _local_place(call, start)
    else:  # every element is the first of a step
        value = emit.unsqueeze(value, dim + 1)
        value = pad_dim(value, ndim - 1 - dim, 0, step - 1)
        value = emit.flatten(value, dim, dim + 1)
    return pad_dim(value, ndim - 1 - dim, start, size - start - taken * step)


def _local_place(call: LocalCall, place: int) -> int:
    """A place in the dim that is cut, between steps of the outer factor, as it counts in the local dim."""
    inner = math.prod(call.rule.factors[index].size for index in call.rule.indices(CUT))
    return place // inner * call.size(CUT)


@rule_maker("aten.slice.Tensor")
def _slice(call: OpCall) -> Rule:
    return _slice_rule(call, call.operands[0], [{0}], free=True)


@rule_maker("aten.slice_backward")
def _slice_backward(call: OpCall) -> Rule:
    assert call.results[0] is not None
    return _slice_rule(call, call.results[0], [{0}], free=False)


@rule_maker("aten.slice_scatter")
def _slice_scatter(call: OpCall) -> Rule:
    return _slice_rule(call, call.operands[0], [{0, 1}], free=False)


@rule_maker("aten.narrow")
def _narrow(call: OpCall) -> Rule:
    operand = call.operands[0]
    dim = _dim(call, len(operand.shape))
    size, start, length = operand.shape[dim], call.arg("start"), call.arg("length")
    start = start + size if start < 0 else start

    def local(program: LocalCall) -> Any:
        return program.run(start=_local_place(program, start), length=_local_place(program, length))

    return cut_rule(call, dim, common_inner_size(size, start, length), linear=[{0}], local=local, free=True)


@rule_maker("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk")
def _split(call: OpCall) -> Rule:
    """Pieces of a dim: local where the factor inside all of them is sharded."""
    (operand,) = call.operands
    dim = _dim(call, len(operand.shape))
    pieces = [meta.shape[dim] for meta in call.results if meta is not None]
    inner = common_inner_size(operand.shape[dim], *itertools.accumulate(pieces))

    def local(program: LocalCall) -> Any:
        sizes = [_local_place(program, piece) for piece in pieces]
        return program.emit.split_with_sizes(program.operands[0], sizes, dim)

    return cut_rule(call, dim, inner, linear=[{0}], local=local, free=True)


@rule_maker("aten.cat", "aten.concat")
def _cat(call: OpCall) -> Rule | None:
    ndim = len(call.operands[0].shape)
    if any(len(operand.shape) != ndim for operand in call.operands):
        return None  # an empty tensor of one dim may be among the others, for historical reasons
    dim = _dim(call, ndim)
    inner = common_inner_size(*(operand.shape[dim] for operand in call.operands))
    return cut_rule(call, dim, inner, linear=[set(range(len(call.operands)))])
