"""Operators that cut dims or put them together: slice, split, select, cat, padding, and their backwards.

A dim of size N that is cut at some boundaries has the greatest common divisor g of N and the boundaries as an inner
factor that the cut leaves alone: the cut is one of the outer factor N / g. Sharding g keeps the operator local
(heads inside a fused projection, say); the outer factor can't be sharded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

CUT = "cut"
"""The inner factor of the dim that is cut."""


def cut_rule(
    call: OpCall, dim: int, inner: int, *, linear: Sequence[set[int]] = (), local: Any = None, free: bool = False
) -> Rule:
    """Every tensor of the call has the same dims but for `dim`, of which `inner` is a common inner factor."""
    sizes: dict[str, int] = {CUT: inner}
    whole: list[str] = []

    def named(place: str, meta: TensorMeta) -> list[list[str]]:
        dims = [[f"d{index}"] for index in range(len(meta.shape))]
        outer = f"{place}_parts"
        dims[dim] = [outer, CUT]
        sizes.update({f"d{index}": size for index, size in enumerate(meta.shape) if index != dim})
        sizes[outer] = meta.shape[dim] // inner
        whole.append(outer)
        if meta.shape[dim] == 0:
            whole.append(CUT)  # nothing is left that could be sharded
        return dims

    operands = [named(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [None if meta is None else named(f"result{position}", meta) for position, meta in enumerate(call.results)]
    return build(sizes, operands, results, whole=whole, linear=linear, local=local, free=free)


def _common(*boundaries: int) -> int:
    """The inner factor that cuts at these boundaries leave alone; 1 where everything is empty."""
    return math.gcd(*boundaries) or 1


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
    """A slice of `whole`, or the reverse; with a step other than one the dim stays whole."""
    dim = _dim(call, len(whole.shape))
    size = whole.shape[dim]
    start, end = _bounds(call, size)
    if call.arg("step") != 1:
        return cut_rule(call, dim, 1, linear=linear, free=free, local=_sized)
    return cut_rule(call, dim, _common(size, start, end), linear=linear, local=_local_slice, free=free)


def _sized(call: LocalCall) -> Any:
    """The operator with its sizes made local, if it takes any."""
    names = [argument.name for argument in call.call.op._schema.arguments]
    return call.run(input_sizes=list(call.result_shape())) if "input_sizes" in names else call.run()


def _local_slice(call: LocalCall) -> Any:
    """The slice with start and end in the local dim."""
    share = call.share(CUT)
    backward = call.call.op._schema.name == "aten::slice_backward"
    whole = call.call.results[0] if backward else call.call.operands[0]
    assert whole is not None
    start, end = _bounds(call.call, whole.shape[_dim(call.call, len(whole.shape))])
    sizes = {"input_sizes": list(call.result_shape())} if backward else {}
    return call.run(start=start // share, end=end // share, **sizes)


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
        share = program.share(CUT)
        return program.run(start=start // share, length=length // share)

    return cut_rule(call, dim, _common(size, start, length), linear=[{0}], local=local, free=True)


@rule_maker("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk")
def _split(call: OpCall) -> Rule:
    """Pieces of a dim: local where the factor inside all of them is sharded."""
    (operand,) = call.operands
    dim = _dim(call, len(operand.shape))
    pieces = [meta.shape[dim] for meta in call.results if meta is not None]
    inner = _common(operand.shape[dim], *itertools.accumulate(pieces))

    def local(program: LocalCall) -> Any:
        share = program.share(CUT)
        sizes = [piece // share for piece in pieces]
        return program.emit.call(torch.ops.aten.split_with_sizes.default, program.operands[0], sizes, dim)

    return cut_rule(call, dim, inner, linear=[{0}], local=local, free=True)


@rule_maker("aten.cat", "aten.concat")
def _cat(call: OpCall) -> Rule | None:
    ndim = len(call.operands[0].shape)
    if any(len(operand.shape) != ndim for operand in call.operands):
        return None  # an empty tensor of one dim may be among the others, for historical reasons
    dim = _dim(call, ndim)
    inner = _common(*(operand.shape[dim] for operand in call.operands))
    return cut_rule(call, dim, inner, linear=[set(range(len(call.operands)))])


@rule_maker("aten.constant_pad_nd")
def _pad(call: OpCall) -> Rule:
    """Padding of the last dims: of each, the factor inside size and padding stays local."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    ndim = len(operand.shape)
    pad = call.arg("pad")
    sizes: dict[str, int] = {}
    source, target, whole = [], [], []
    for dim, size in enumerate(operand.shape):
        before, after = _padding(pad, ndim, dim)
        inner = _common(size, before, after)
        sizes |= {f"d{dim}": inner, f"operand_parts{dim}": size // inner}
        sizes[f"result_parts{dim}"] = result.shape[dim] // inner
        if before or after:
            whole += [f"operand_parts{dim}", f"result_parts{dim}"]
        else:
            inner = size
            sizes |= {f"d{dim}": size, f"operand_parts{dim}": 1, f"result_parts{dim}": 1}
        source.append([f"operand_parts{dim}", f"d{dim}"])
        target.append([f"result_parts{dim}", f"d{dim}"])

    def local(program: LocalCall) -> Any:
        amounts = [amount // program.share(f"d{ndim - 1 - index // 2}") for index, amount in enumerate(pad)]
        return program.run(pad=amounts)

    return build(sizes, [source], [target], whole=whole, linear=[{0}] if call.arg("value") == 0 else [], local=local)


def _padding(pad: Sequence[int], ndim: int, dim: int) -> tuple[int, int]:
    """Padding before and after a dim; `pad` counts from the last dim."""
    index = 2 * (ndim - 1 - dim)
    return (pad[index], pad[index + 1]) if index < len(pad) else (0, 0)


def _gone(call: OpCall, with_dim: Sequence[int], results: bool, linear: Sequence[set[int]], **options: Any) -> Rule:
    """A dim, whole, that some tensors have and others lack.

    Args:
        with_dim: the operands that have the dim.
        results: whether the results have it.
    """
    having = call.operands[with_dim[0]] if with_dim else call.results[0]
    assert having is not None
    dim = _dim(call, len(having.shape))
    sizes = {f"d{index}": size for index, size in enumerate(having.shape)}
    full = [[name] for name in sizes]
    short = full[:dim] + full[dim + 1 :]
    operands = [full if position in with_dim else short for position in range(len(call.operands))]
    targets = [full if results else short] * len(call.results)
    return build(sizes, operands, targets, whole=[f"d{dim}"], linear=linear, **options)


@rule_maker("aten.select.int")
def _select(call: OpCall) -> Rule:
    return _gone(call, [0], False, [{0}], free=True)


@rule_maker("aten.unbind")
def _unbind(call: OpCall) -> Rule:
    return _gone(call, [0], False, [{0}], free=True)


@rule_maker("aten.select_backward")
def _select_backward(call: OpCall) -> Rule:
    return _gone(call, [], True, [{0}], local=_sized)


@rule_maker("aten.select_scatter")
def _select_scatter(call: OpCall) -> Rule:
    return _gone(call, [0], True, [{0, 1}])


@rule_maker("aten.stack")
def _stack(call: OpCall) -> Rule:
    return _gone(call, [], True, [set(range(len(call.operands)))])
