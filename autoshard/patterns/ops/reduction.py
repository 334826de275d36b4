"""Reductions: shards give partial results of some kind, or are reduced inside the local program."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoshard.operator_library import accumulation_dtype
from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import (
    all_reduce_over,
    argument_dim,
    if_sharded,
    numbered_dims,
    positions,
    reshape_along,
    result_dtype,
    stretch_start,
)
from autoshard.patterns.padding import is_padded, steps_of_ranks, without_padded_steps, without_padding
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import Exchange, LocalProgram, NamedDims, OpCall, Rule, build
from autoshard.specs.emitter import collectives


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes: those in its argument `dim`, or all."""
    ndim = len(call.operands[0].shape)
    dim = call.arg("dim") if "dim" in call.argument_names else None
    # For `any` and `all` an empty list means no dims; for all others, all dims.
    if dim == () and call.name in ("aten::any", "aten::all"):
        return ()
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
        kinds: kind of partial result where a reduced dim is sharded, for all results or one kind for each; None where
            `local` reduces inside.
        split: whether a reduced dim may be sharded at all.
        contiguous: whether a reduced dim may only be split into contiguous stretches.
        exchange: bytes that `local` all-reduces inside, or the collectives that it runs.
        fill: the neutral element, if there is one, which replaces padding.
        uneven: whether `local` handles padding of a reduced dim without a neutral element.
    """
    sizes = numbered_dims(call.operands[0].shape)
    names = reduced_names(call)
    kept = [name for name in sizes if name not in names]
    keepdim: NamedDims = [[] if name in names else name for name in sizes]
    results = [None if meta is None else keepdim if len(meta.shape) == len(sizes) else kept for meta in call.results]
    return build(
        sizes,
        [list(sizes)],
        results,
        whole=[] if split else names,
        contiguous=names if contiguous else [],
        reductions={name: tuple(kinds) * (len(results) // len(kinds)) for name in names},
        exchange=dict.fromkeys(names, exchange),
        linear=linear,
        local=local,
        uneven=kept,
        fill=dict.fromkeys(names, fill) if uneven or fill is not None else {},
    )


def reduced_names(call: OpCall) -> list[str]:
    """Names of the dims that a reduction removes."""
    return [f"d{dim}" for dim in reduced_dims(call)]


def sharded_dims(call: LocalCall) -> list[str]:
    """Names of the sharded dims that a reduction removes."""
    return [name for name in reduced_names(call.call) if call.axes(name)]


rule_maker("aten.sum", linear=[{0}], fill=0.0)(reduction_rule)
rule_maker("aten.nansum", "aten.count_nonzero", fill=0.0)(reduction_rule)


@rule_maker("aten.mean")
def _mean(call: OpCall) -> Rule:
    """The mean of a shard is not a partial sum: weigh each rank's mean by its share of the elements."""
    return reduction_rule(call, linear=[{0}], local=_local_mean, fill=0.0)


def _local_mean(call: LocalCall) -> Any:
    dims = reduced_dims(call.call)
    whole = math.prod(call.call.operands[0].shape[dim] for dim in dims)
    local = math.prod(call.size(f"d{dim}") for dim in dims)
    mean = call.run()
    # The kernel divides by the local count, padding included: multiply by it for the shard's term of the sum.
    return mean if local == whole else mean * (local / whole)


for _kind, _neutral_element, _names in (
    ("max", -math.inf, ("aten.amax", "aten.max.default")),
    ("min", math.inf, ("aten.amin", "aten.min.default")),
    ("product", 1.0, ("aten.prod",)),
):
    rule_maker(*_names, kinds=(_kind,), fill=_neutral_element)(reduction_rule)


@rule_maker("aten.aminmax", "aten._aminmax")
def _aminmax(call: OpCall) -> Rule:
    return reduction_rule(call, kinds=("min", "max"), local=_local_aminmax, uneven=True)


def _local_aminmax(call: LocalCall) -> Any:
    """Minimum and maximum at once; with padding, by separate neutral elements."""
    # No number is neutral for both: with padding, the operator runs twice.
    (value,), names = call.operands, sharded_dims(call)
    least, largest = (without_padding(call, 0, value, names, far) for far in (math.inf, -math.inf))
    if least is value:
        return call.run()
    return call.run(operands=[least])[0], call.run(operands=[largest])[1]


@rule_maker("aten.any", "aten.all", "aten._is_any_true", "aten._is_all_true")
def _any_all(call: OpCall) -> Rule:
    """Booleans cannot be partial: reduce them inside the local program."""
    fill = 0.0 if "any" in call.name else 1.0
    return reduction_rule(call, kinds=(None,), local=_local_any_all, exchange=call.result.bytes, fill=fill)


def _local_any_all(call: LocalCall) -> Any:
    value, names = call.run(), sharded_dims(call)
    if not names:
        return value
    # Collectives do not reduce booleans. Reduce them as integers: max is any, min is all.
    kind = "max" if "any" in call.call.name else "min"
    return all_reduce_over(call, value.to(torch.uint8), names, kind).to(result_dtype(call))


# Order statistics of a dim, which must be whole.
rule_maker("aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue", split=False)(reduction_rule)


@rule_maker("aten.logsumexp")
def _logsumexp(call: OpCall) -> Rule:
    """Ranks of a sharded dim exchange the maximum and the sum of exponentials."""
    return reduction_rule(
        call,
        kinds=(None,),
        split=not call.result.dtype.is_complex,  # complex numbers have no maximum
        local=_local_logsumexp,
        exchange=2 * call.result.bytes,
        fill=None if call.operands[0].dtype is torch.bool else -math.inf,  # False counts as exp(0)
    )


@if_sharded(by=reduced_names)
def _local_logsumexp(call: LocalCall) -> Any:
    dims, names = list(reduced_dims(call.call)), sharded_dims(call)
    value = call.operands[0].to(result_dtype(call))  # differences of integers may overflow
    top = all_reduce_over(call, value.amax(dims, True), names, "max")
    # If the maximum is infinite, so is the result; subtracting it would give nan.
    top = top.masked_fill(top.abs().eq(math.inf), 0)
    total = all_reduce_over(call, (value - top).exp().sum(dims, True), names)
    return (total.log() + top).reshape(list(call.result_shape())).to(result_dtype(call))


# Extreme values and their indices: ranks agree on the value, then on its first index.
#
# torch returns the first of equal values, and nan is more extreme than any number. A rank offers the index of its
# extreme value if that is the global one; the smallest offered index wins. The index of a nan is offered before all
# others, so that the result does not depend on how the collective treats nan.


@rule_maker("aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin")
def _extreme(call: OpCall) -> Rule:
    """Values, if requested, and indices; ranks of a sharded dim exchange one of each."""
    dtype, place = call.operands[0].dtype, call.results[-1]
    assert place is not None
    exchange = math.prod(place.shape) * (dtype.itemsize + place.dtype.itemsize)
    # Padding is after all elements, so the first index is that of an element even where all equal the padding.
    fill = -math.inf if "max" in call.name else math.inf
    return reduction_rule(call, kinds=(None,), contiguous=True, local=_local_extreme, exchange=exchange, fill=fill)


@if_sharded(by=reduced_names)
def _local_extreme(call: LocalCall) -> Any:
    (value,), dims, names = call.operands, reduced_dims(call.call), sharded_dims(call)
    dtype = value.dtype
    if dtype is torch.bool:
        # Kernels of `max` accept booleans, the collective does not.
        value = value.to(torch.uint8)
    if len(dims) != 1:  # all dims, flattened
        value = value.reshape([-1])
    dim = dims[0] if len(dims) == 1 else 0
    largest = "max" in call.call.name
    best, place = value.max(dim) if largest else value.min(dim)
    place = _global_index(call, place, dims)
    best, place = _global_extreme(call, best, place, names, "max" if largest else "min")
    place = place.reshape(list(call.result_shape(-1)))
    if len(call.call.results) == 1:
        return place
    return best.to(dtype).reshape(list(call.result_shape())), place


def _global_index(call: LocalCall, place: Any, dims: Sequence[int]) -> Any:
    """Convert a row-major index into the local dims `dims` to one into the global dims."""
    whole, local = call.call.operands[0].shape, call.operand_shape(0)
    total, stride = None, 1
    for dim in reversed(dims):
        inner = place.remainder(local[dim])
        place = place.div(local[dim], rounding_mode="floor")
        if call.axes(f"d{dim}"):
            inner = inner + stretch_start(call, f"d{dim}", local[dim])
        inner = inner * stride
        total = inner if total is None else total + inner
        stride *= whole[dim]
    return total


def _global_extreme(call: LocalCall, best: Any, place: Any, names: Sequence[str], kind: str) -> tuple[Any, Any]:
    """The extreme value of all ranks, and its first index."""
    emit, last = call.emit, math.prod(call.call.operands[0].shape)
    top = all_reduce_over(call, best, names, kind)
    # Between all indices of nan, and "no offer".
    offer = emit.where(best.eq(top), place + last, 2 * last)
    number = best.dtype.is_floating_point
    if number:
        offer = emit.where(best.isnan(), place, offer)
    winner = all_reduce_over(call, offer, names, "min")
    if number:
        top = top.masked_fill(winner < last, math.nan)
    return top, winner.remainder(last)


@rule_maker("aten.value_selecting_reduction_backward")
def _selected_backward(call: OpCall) -> Rule:
    """Gradient of max, min, median along a dim; where the dim is sharded, a rank writes within its stretch."""
    sizes = numbered_dims(call.result.shape)
    name = f"d{argument_dim(call, len(sizes))}"
    source: NamedDims = [[] if dim == name else dim for dim in sizes if call.arg("keepdim") or dim != name]
    local = _local_selected_backward
    return build(sizes, [source, source], [list(sizes)], contiguous=[name], linear=[{0}], local=local, uneven=True)


def _local_selected_backward(call: LocalCall) -> Any:
    shape = list(call.result_shape())
    dim = argument_dim(call, len(shape))
    if not call.axes(f"d{dim}"):
        return call.run(sizes=shape)
    gradient, index = call.operands
    if not call.arg("keepdim"):
        gradient, index = (value.unsqueeze(dim) for value in (gradient, index))
    # Compare, not scatter: indices of other stretches are out of range here.
    held = positions(call, f"d{dim}", shape[dim], gradient.device)
    return call.emit.where(index.eq(reshape_along(held, dim, len(shape))), gradient, 0)


# Vector norms: shards give partial results, or the norm is computed from the shards' norms.

_PARTIAL = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}
"""Order -> kind of partial result that a shard's norm is; other orders have none."""


def _order(call: OpCall) -> float:
    order = call.arg("ord" if call.name == "aten::linalg_vector_norm" else "p")
    # `aten.norm` takes None for the Euclidean norm.
    return 2.0 if order is None else float(order)


@rule_maker("aten.linalg_vector_norm", "aten.norm")
def _norm(call: OpCall) -> Rule:
    order = _order(call)
    if order in _PARTIAL:
        return reduction_rule(call, kinds=(_PARTIAL[order],), fill=_neutral(order))
    exchange = math.prod(call.result.shape) * accumulation_dtype(call.result.dtype).itemsize
    return reduction_rule(call, kinds=(None,), local=_combine_norms, exchange=exchange, fill=_neutral(order))


def _neutral(order: float) -> float:
    """The number that does not change a norm: its power is zero, or it is never the minimum."""
    return math.inf if order < 0 else 0.0


@rule_maker("aten.dist")
def _dist(call: OpCall) -> Rule:
    """The norm of the difference of two tensors that are broadcast together."""
    order = _order(call)
    kind = _PARTIAL.get(order)
    equal = len({meta.shape for meta in call.operands}) == 1  # padding of both, at distance 0
    fill = {"...": 0.0} if equal and order >= 0 else {}
    local = None if kind else _combine_norms
    return bind("..., ... -> ", call, reduce={"...": kind}, local=local, uneven=(), fill=fill)


def _combine_norms(call: LocalCall) -> Any:
    """The norm from the norms of the shards, whose powers are summed."""
    # From the rule, not by `reduced_dims`: `dist` has no argument `dim`.
    kept = {index for dim in call.rule.results[0] or () for index in dim}
    reduced = (factor.base for index, factor in enumerate(call.rule.factors) if index not in kept)
    names = [name for name in dict.fromkeys(reduced) if call.axes(name)]
    if not names:
        return call.run()
    order = _order(call.call)
    # A power may overflow half precision though the norm does not.
    norm = call.run().to(accumulation_dtype(result_dtype(call)))
    total = all_reduce_over(call, norm.pow(order), names)
    return total.pow(1 / order).to(result_dtype(call))


# Mean and variance over sharded dims: each rank computes those of its part, and one gather combines them.
#
# The sum of squares minus the square of the sum would need one all-reduce, but loses all digits where the mean is large
# relative to the deviations. Two passes, a sum and then the squared deviations, would need two. One gather of moments
# is as exact, and takes as long as one all-reduce for few numbers: on eight H100 it is faster than two up to a hundred
# thousand means.
#
# Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983): pairwise joins, shifted data.


def moments_exchange(means: int, dtype: torch.dtype) -> list[Exchange]:
    """Collectives of `joined_moments` when one factor is sharded.

    Args:
        means: number of means.
        dtype: of the elements.
    """
    return [("gather_of_each", 3 * means * accumulation_dtype(dtype).itemsize)]


def joined_moments(call: LocalCall, value: Any, layout: Sequence[str]) -> tuple[Any, Any]:
    """Mean and biased variance over sharded dims, as exact as on one device.

    Args:
        call: the call.
        value: the local tensor. Padding along the factors of `layout` is zero.
        layout: for every dim of `value`, its factors, such as `"k s0"`; `""` for dims that are not reduced.

    Returns:
        Both in the accumulation dtype, with reduced dims of size 1, equal on all ranks that share the factors.
    """
    factors = {index for dim in layout for name in dim.split() for index in call.rule.indices(name)}
    moments = _shard_moments(call, value, layout)
    for axis, choice in enumerate(call.choices):
        if choice in factors:
            moments = _combine_moments(call, moments, axis)
    origin, offset, variance = moments
    return origin + offset, variance


def _shard_moments(call: LocalCall, value: Any, layout: Sequence[str]) -> tuple[Any, Any, Any]:
    """Moments of a rank's part: an origin, the distance of the mean from it, and the biased variance.

    The origin is the first element, so that the mean and its distance to those of other ranks are rounded less coarsely
    than the elements. The moments of a part that is all padding are zero.
    """
    dims = [dim for dim, factors in enumerate(layout) if factors]
    # The first element along the dims, which are kept with size 1.
    origin = value
    for dim in dims:
        origin = origin.slice(dim, 0, 1)
    origin = origin.to(accumulation_dtype(value.dtype))
    value = value - origin
    names = [name for dim in layout for name in dim.split()]
    if not is_padded(call, names):
        variance, mean = value.var_mean(dims, correction=0, keepdim=True)
        return origin, mean, variance
    count = _shard_count(call, origin, names).clamp_min(1)

    def average(value: Any) -> Any:
        value = without_padded_steps(call, value, layout)
        return value.sum(dims, True) / count

    mean = average(value)
    deviation = value - mean
    return origin, mean, average(deviation * deviation)


def _shard_count(call: LocalCall, like: Any, names: Sequence[str]) -> Any:
    """Number of elements of a rank along some factors, without padding: `[1]`, in the dtype of `like`."""
    emit, count = call.emit, None
    for name in names:
        ones = emit.full([call.size(name)], 1, dtype=like.dtype, device=like.device)
        steps = without_padded_steps(call, ones, [name]).sum([0], True)
        count = steps if count is None else count * steps
    return count


def _combine_moments(call: LocalCall, moments: tuple[Any, Any, Any], axis: int) -> tuple[Any, Any, Any]:
    """Combine the moments of the ranks of an axis.

    The origin is that of the first rank, which has elements if any rank does.
    """
    emit, size = call.emit, call.mesh.sizes[axis]
    # One gather for all three: they are small, and latency dominates.
    stacked = emit.stack(list(moments)).unsqueeze(0)
    gathered = emit.collective(collectives.all_gather_into_tensor.default, stacked, size, axis=axis)
    origins, offsets, variances = (gathered.select(1, index) for index in range(3))
    weights = _rank_weights(call, offsets, axis)

    def average(values: Any) -> Any:
        if weights is None:
            return values.mean([0])
        return (values * weights).sum([0])

    origin = origins.select(0, 0)
    offsets = origins - origin + offsets
    offset = average(offsets)
    deviation = offsets - offset
    squares = deviation * deviation
    return origin, offset, average(variances + squares)


def _rank_weights(call: LocalCall, like: Any, axis: int) -> Any:
    """Each rank's fraction of the elements on an axis, as weights for values `[ranks, ...]`; None for equal fractions.

    Fractions differ where the axis pads its factor or has unequal shares; other axes scale those of all ranks equally.
    """
    steps = steps_of_ranks(call, axis, like.device)
    if steps is None:
        return None
    steps = steps.to(like.dtype)
    weights = steps / steps.sum()
    return weights.view([-1, *[1] * (len(like.shape) - 1)])


@rule_maker("aten.var", "aten.std", "aten.var_mean", "aten.std_mean")
def _moments(call: OpCall) -> Rule:
    dtype = call.operands[0].dtype
    if dtype.is_complex:
        return reduction_rule(call, split=False)
    exchange = moments_exchange(math.prod(call.result.shape), dtype)
    return reduction_rule(call, kinds=(None,), local=_local_moments, exchange=exchange, fill=0.0)


def _local_moments(call: LocalCall) -> Any:
    if not sharded_dims(call):
        return call.run()
    dims, shape = reduced_dims(call.call), call.call.operands[0].shape
    layout = [f"d{dim}" if dim in dims else "" for dim in range(len(shape))]
    mean, spread = joined_moments(call, call.operands[0], layout)
    count = math.prod(shape[dim] for dim in dims)
    above, below = _correction(call.call).as_integer_ratio()  # a dynamic size minus a float would become a plain float
    left = max(0.0, (count * below - above) / below)
    # Combined moments are biased: divided by the number of all elements.
    if left != count:
        spread = spread * count / left
    name = call.call.name
    if name.startswith("aten::std"):
        spread = spread.sqrt()
    spread, mean = (value.reshape(list(call.result_shape())).to(result_dtype(call)) for value in (spread, mean))
    return (spread, mean) if name.endswith("_mean") else spread


def _correction(call: OpCall) -> float:
    """The number that is subtracted from the number of elements before dividing by it."""
    if "unbiased" in call.argument_names:
        return float(call.arg("unbiased"))
    correction = call.arg("correction")
    return 1.0 if correction is None else float(correction)
