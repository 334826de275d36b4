"""Reductions whose shards leave partial results of some kind, or agree by one reduction inside."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import all_reduce_over, cast, result_dtype
from autoshard.patterns.padding import without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, LocalProgram, OpCall, Rule


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes: those in its argument `dim`, all without one."""
    ndim = len(call.operands[0].shape)
    dim = call.arg("dim") if any(argument.name == "dim" for argument in call.op._schema.arguments) else None
    if dim == () and call.op._schema.name in ("aten::any", "aten::all"):
        return ()  # these take an empty list at its word
    if dim is None or dim == ():
        return tuple(range(ndim))
    dims = dim if isinstance(dim, tuple) else (dim,)
    return tuple(sorted(index % ndim for index in dims)) if ndim else ()


def reduction_rule(
    call: OpCall,
    *,
    kinds: Sequence[str | None] = ("sum",),
    split: bool = True,
    contiguous: bool = False,
    linear: Sequence[Collection[int]] = (),
    local: LocalProgram | None = None,
    exchange: int | Sequence[Exchange] = 0,
    fill: float | None = None,
    uneven: bool = False,
) -> Rule:
    """A reduction over the dims in the argument `dim`, for any number of results.

    Args:
        kinds: kind of partial that the shards of a reduced dim leave, for all results or one kind for each; None
            where `local` reduces inside.
        split: whether a reduced dim may be sharded at all.
        contiguous: whether of a reduced dim only whole stretches may be taken.
        exchange: bytes that `local` all-reduces inside, or the collectives that it runs.
        fill: the number that does not change the result, where there is one; it takes the place of padding.
        uneven: whether `local` copes with padding of a reduced dim where no one number does.
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
        contiguous=names if contiguous else [],
        reductions={name: tuple(kinds) * (len(results) // len(kinds)) for name in names},
        exchange=dict.fromkeys(names, exchange),
        linear=linear,
        local=local,
        uneven=[f"d{dim}" for dim in range(len(operand.shape)) if dim not in reduced],
        fill=dict.fromkeys(names, fill) if uneven or fill is not None else {},
    )


def sharded_dims(call: LocalCall) -> list[str]:
    """Names of the dims that a reduction removes and that are sharded."""
    return [name for name in (f"d{dim}" for dim in reduced_dims(call.call)) if call.axes(name)]


@rule_maker("aten.sum", "aten.nansum", "aten.count_nonzero")
def _sum(call: OpCall) -> Rule:
    return reduction_rule(call, linear=[{0}] if call.op._schema.name == "aten::sum" else [], fill=0.0)


@rule_maker("aten.mean")
def _mean(call: OpCall) -> Rule:
    """A mean over shards is no plain partial sum: each rank's mean counts for its share of the elements."""
    return reduction_rule(call, linear=[{0}], local=_local_mean, fill=0.0)


def _local_mean(call: LocalCall) -> Any:
    dims = reduced_dims(call.call)
    whole = math.prod(call.call.operands[0].shape[dim] for dim in dims)
    own = math.prod(call.size(f"d{dim}") for dim in dims)
    mean = call.run()
    return mean if own == whole else mean * (own / whole)


@rule_maker("aten.amax", "aten.max.default")
def _amax(call: OpCall) -> Rule:
    return reduction_rule(call, kinds=("max",), fill=-math.inf)


@rule_maker("aten.amin", "aten.min.default")
def _amin(call: OpCall) -> Rule:
    return reduction_rule(call, kinds=("min",), fill=math.inf)


@rule_maker("aten.prod")
def _prod(call: OpCall) -> Rule:
    return reduction_rule(call, kinds=("product",), fill=1.0)


@rule_maker("aten.aminmax", "aten._aminmax")
def _aminmax(call: OpCall) -> Rule:
    return reduction_rule(call, kinds=("min", "max"), local=_local_aminmax, uneven=True)


def _local_aminmax(call: LocalCall) -> Any:
    """Both at once; where a reduced dim is padded, by what is as far off as can be for either."""
    (value,), names = call.operands, sharded_dims(call)
    least, largest = (without_padding(call, 0, value, names, far) for far in (math.inf, -math.inf))
    if least is value:
        return call.run()
    return call.run(operands=[least])[0], call.run(operands=[largest])[1]


@rule_maker("aten.any", "aten.all", "aten._is_any_true", "aten._is_all_true")
def _any_all(call: OpCall) -> Rule:
    """Truth values are no numbers that a partial result could be made of: they are agreed upon at once."""
    assert call.results[0] is not None
    fill = 0.0 if "any" in call.op._schema.name else 1.0
    return reduction_rule(call, kinds=(None,), local=_local_any_all, exchange=call.results[0].bytes, fill=fill)


def _local_any_all(call: LocalCall) -> Any:
    value, names = call.run(), sharded_dims(call)
    if not names:
        return value
    kind = "max" if "any" in call.call.op._schema.name else "min"
    return cast(call, all_reduce_over(call, cast(call, value, torch.uint8), names, kind), result_dtype(call))


@rule_maker("aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue")
def _order_statistic(call: OpCall) -> Rule:
    """Elements picked by their rank among all of a dim, which must be whole."""
    return reduction_rule(call, split=False)


@rule_maker("aten.logsumexp")
def _logsumexp(call: OpCall) -> Rule:
    """A sharded dim exchanges the maximum and the sum of exponentials."""
    assert call.results[0] is not None
    return reduction_rule(
        call,
        kinds=(None,),
        split=not call.results[0].dtype.is_complex,  # complex numbers have no maximum
        local=_local_logsumexp,
        exchange=2 * call.results[0].bytes,
        fill=None if call.operands[0].dtype is torch.bool else -math.inf,  # False counts as exp(0)
    )


def _local_logsumexp(call: LocalCall) -> Any:
    dims, names = list(reduced_dims(call.call)), sharded_dims(call)
    if not names:
        return call.run()
    emit, value = call.emit, cast(call, call.operands[0], result_dtype(call))  # differences of integers may overflow
    top = all_reduce_over(call, emit.amax(value, dims, True), names, "max")
    # An infinite maximum is its own logarithm of the sum; subtracting it would give nan.
    infinite = emit.eq(emit.abs(top), math.inf)
    top = emit.masked_fill(top, infinite, 0)
    total = emit.exp(value - top)
    total = all_reduce_over(call, emit.sum(total, dims, True), names)
    whole = emit.log(total) + top
    return cast(call, emit.reshape(whole, list(call.result_shape())), result_dtype(call))
