"""Reductions, scans and sorts."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import LocalProgram, OpCall, Rule

aten = torch.ops.aten


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes: those in its argument `dim`, all without one."""
    ndim = len(call.operands[0].shape)
    dim = call.arg("dim") if any(argument.name == "dim" for argument in call.op._schema.arguments) else None
    if dim is None or dim == ():
        return tuple(range(ndim))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return tuple(sorted(index % ndim for index in dims)) if ndim else ()


def reduction_rule(
    call: OpCall,
    *,
    kind: str | None = "sum",
    split: bool = True,
    linear: Sequence[Collection[int]] = (),
    local: LocalProgram | None = None,
    exchange: int = 0,
) -> Rule:
    """A reduction over the dims in the argument `dim`, for any number of results.

    Args:
        kind: kind of partial that the shards of a reduced dim leave; None where `local` reduces inside.
        split: whether a reduced dim may be sharded at all.
        exchange: bytes that `local` all-reduces inside.
    """
    operand = call.operands[0]
    reduced = reduced_dims(call)
    sizes = {f"d{dim}": size for dim, size in enumerate(operand.shape)}
    source = [[name] for name in sizes]
    names = [f"d{dim}" for dim in reduced]
    kept = [[name] for dim, name in enumerate(sizes) if dim not in reduced]
    keepdim = [[] if dim in reduced else [name] for dim, name in enumerate(sizes)]
    results = [None if meta is None else keepdim if len(meta.shape) == len(sizes) else kept for meta in call.results]
    return build(
        sizes,
        [source],
        results,
        whole=[] if split else names,
        reductions={name: (kind,) * len(results) for name in names},
        exchange=dict.fromkeys(names, exchange),
        linear=linear,
        local=local,
    )


@rule_maker("aten.sum", "aten.nansum", "aten.count_nonzero")
def _sum(call: OpCall) -> Rule:
    return reduction_rule(call, linear=[{0}] if call.op._schema.name == "aten::sum" else [])


@rule_maker("aten.mean")
def _mean(call: OpCall) -> Rule:
    """A mean over shards is no plain partial sum: each rank's mean counts for its share of the elements."""
    return reduction_rule(call, linear=[{0}], local=_local_mean)


def _local_mean(call: LocalCall) -> Any:
    share = math.prod(call.share(f"d{dim}") for dim in reduced_dims(call.call))
    mean = call.run()
    return mean if share == 1 else call.emit.call(aten.div.Scalar, mean, share)


@rule_maker("aten.amax", "aten.max.default")
def _amax(call: OpCall) -> Rule:
    return reduction_rule(call, kind="max")


@rule_maker("aten.amin", "aten.min.default")
def _amin(call: OpCall) -> Rule:
    return reduction_rule(call, kind="min")


@rule_maker("aten.prod")
def _prod(call: OpCall) -> Rule:
    return reduction_rule(call, kind="product")


@rule_maker(
    "aten.max.dim",
    "aten.min.dim",
    "aten.argmax",
    "aten.argmin",
    "aten.any",
    "aten.all",
    "aten.var",
    "aten.var_mean",
    "aten.std",
    "aten.std_mean",
    "aten.linalg_vector_norm",
    "aten.norm",
    "aten.median",
    "aten.mode",
    "aten.kthvalue",
    "aten.aminmax",
)
def _whole_reduction(call: OpCall) -> Rule:
    """Reductions that need all elements of a reduced dim at once."""
    return reduction_rule(call, split=False)


@rule_maker("aten.logsumexp")
def _logsumexp(call: OpCall) -> Rule:
    """A sharded dim exchanges the maximum and the sum of exponentials."""
    assert call.results[0] is not None
    return reduction_rule(call, kind=None, local=_local_logsumexp, exchange=2 * call.results[0].bytes)


def _local_logsumexp(call: LocalCall) -> Any:
    dims = reduced_dims(call.call)
    names = [f"d{dim}" for dim in dims]
    if not any(call.axes(name) for name in names):
        return call.run()
    emit, (value,) = call.emit, call.operands
    top = emit.call(aten.amax.default, value, list(dims), True)
    for name in names:
        top = call.all_reduce(top, name, "max")
    # An infinite maximum is its own logarithm of the sum; subtracting it would give nan.
    infinite = emit.call(aten.eq.Scalar, emit.call(aten.abs.default, top), math.inf)
    top = emit.call(aten.masked_fill.Scalar, top, infinite, 0)
    total = emit.call(aten.exp.default, emit.call(aten.sub.Tensor, value, top))
    total = emit.call(aten.sum.dim_IntList, total, list(dims), True)
    for name in names:
        total = call.all_reduce(total, name)
    whole = emit.call(aten.add.Tensor, emit.call(aten.log.default, total), top)
    return emit.call(aten.reshape.default, whole, list(call.result_shape()))


def scan_rule(call: OpCall, dims: Collection[int], linear: Sequence[Collection[int]] = ()) -> Rule:
    """An operator along some dims that keeps all dims; these must be whole, whatever size they have in the results."""
    operand = call.operands[0]
    sizes = {f"d{dim}": size for dim, size in enumerate(operand.shape)}
    source = [[name] for name in sizes]
    whole = [f"d{dim}" for dim in dims]
    results: list[list[list[str]] | None] = []
    for meta in call.results:
        if meta is None:
            results.append(None)
            continue
        target = list(source)
        for dim in dims:
            if meta.shape[dim] != operand.shape[dim]:
                sizes[f"result{dim}"] = meta.shape[dim]
                whole.append(f"result{dim}")
                target[dim] = [f"result{dim}"]
        results.append(target)
    return build(sizes, [source], results, whole=whole, linear=linear)


@rule_maker(
    "aten.cumsum",
    "aten.cumprod",
    "aten.cummax",
    "aten.cummin",
    "aten.logcumsumexp",
    "aten.sort",
    "aten.argsort",
    "aten.topk",
)
def _scan(call: OpCall) -> Rule:
    ndim = len(call.operands[0].shape)
    linear = [{0}] if call.op._schema.name == "aten::cumsum" else []
    return scan_rule(call, [call.arg("dim") % ndim] if ndim else [], linear)


@rule_maker("aten.value_selecting_reduction_backward")
def _selected_backward(call: OpCall) -> Rule:
    """Gradient of max, min, median along a dim: the dim is whole in the result."""
    (result,) = call.results
    assert result is not None
    ndim = len(result.shape)
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    target = [[name] for name in sizes]
    dim = call.arg("dim") % ndim if ndim else 0
    source = [[] if index == dim else names for index, names in enumerate(target)]
    if not call.arg("keepdim"):
        source = source[:dim] + source[dim + 1 :]
    whole = [f"d{dim}"]
    return build(sizes, [source, source], [target], whole=whole, linear=[{0}], local=_selected_local)


def _selected_local(call: LocalCall) -> Any:
    return call.run(sizes=list(call.result_shape()))
