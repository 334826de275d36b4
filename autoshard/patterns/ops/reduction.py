"""Reductions whose shards leave partial results of some kind, or agree by one reduction inside."""

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
    # `any` and `all` take an empty list at its word; for all others it stands for all dims.
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
        kinds: kind of partial that the shards of a reduced dim leave, for all results or one kind for each; None
            where `local` reduces inside.
        split: whether a reduced dim may be sharded at all.
        contiguous: whether of a reduced dim only whole stretches may be taken.
        exchange: bytes that `local` all-reduces inside, or the collectives that it runs.
        fill: the number that does not change the result, where there is one; it takes the place of padding.
        uneven: whether `local` copes with padding of a reduced dim where no one number does.
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
    """Names of the dims that a reduction removes and that are sharded."""
    return [name for name in reduced_names(call.call) if call.axes(name)]


rule_maker("aten.sum", linear=[{0}], fill=0.0)(reduction_rule)
rule_maker("aten.nansum", "aten.count_nonzero", fill=0.0)(reduction_rule)


@rule_maker("aten.mean")
def _mean(call: OpCall) -> Rule:
    """A mean over shards is no plain partial sum: each rank's mean counts for its share of the elements."""
    return reduction_rule(call, linear=[{0}], local=_local_mean, fill=0.0)


def _local_mean(call: LocalCall) -> Any:
    dims = reduced_dims(call.call)
    whole = math.prod(call.call.operands[0].shape[dim] for dim in dims)
    local = math.prod(call.size(f"d{dim}") for dim in dims)
    mean = call.run()
    # The local count is that of the kernel, padding included: with it the mean becomes the shard's part of the sum.
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
    """Both at once; where a reduced dim is padded, by what is as far off as can be for either."""
    # No one number is neutral for both: padded, the operator runs twice.
    (value,), names = call.operands, sharded_dims(call)
    least, largest = (without_padding(call, 0, value, names, far) for far in (math.inf, -math.inf))
    if least is value:
        return call.run()
    return call.run(operands=[least])[0], call.run(operands=[largest])[1]


@rule_maker("aten.any", "aten.all", "aten._is_any_true", "aten._is_all_true")
def _any_all(call: OpCall) -> Rule:
    """Truth values are no numbers that a partial result could be made of: they are agreed upon at once."""
    fill = 0.0 if "any" in call.name else 1.0
    return reduction_rule(call, kinds=(None,), local=_local_any_all, exchange=call.result.bytes, fill=fill)


def _local_any_all(call: LocalCall) -> Any:
    value, names = call.run(), sharded_dims(call)
    if not names:
        return value
    # Collectives do not reduce booleans. Reduce them as integers: max is any, min is all.
    kind = "max" if "any" in call.call.name else "min"
    return all_reduce_over(call, value.to(torch.uint8), names, kind).to(result_dtype(call))


# Elements picked by their rank among all of a dim, which must be whole.
rule_maker("aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue", split=False)(reduction_rule)


@rule_maker("aten.logsumexp")
def _logsumexp(call: OpCall) -> Rule:
    """A sharded dim exchanges the maximum and the sum of exponentials."""
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
    # An infinite maximum is its own logarithm of the sum; subtracting it would give nan.
    top = top.masked_fill(top.abs().eq(math.inf), 0)
    total = all_reduce_over(call, (value - top).exp().sum(dims, True), names)
    return (total.log() + top).reshape(list(call.result_shape())).to(result_dtype(call))


# Extreme values and where they stand: the ranks agree on the value, then on the first place that holds it.
#
# torch gives the first of equal values, and takes nan for more extreme than any number. A rank offers the place of
# its own extreme value if that is the extreme of all; of the places offered, the first wins. A nan is offered as if
# it stood in front of everything, so that the collective may treat it as it likes.


@rule_maker("aten.max.dim", "aten.min.dim", "aten.argmax", "aten.argmin")
def _extreme(call: OpCall) -> Rule:
    """Values, if they are asked for, and indices; a sharded dim exchanges one of each twice."""
    dtype, place = call.operands[0].dtype, call.results[-1]
    assert place is not None
    exchange = math.prod(place.shape) * (dtype.itemsize + place.dtype.itemsize)
    # Padding stands behind all elements, so that the first place is an element's even where all are as extreme as it.
    fill = -math.inf if "max" in call.name else math.inf
    return reduction_rule(call, kinds=(None,), contiguous=True, local=_local_extreme, exchange=exchange, fill=fill)


@if_sharded(by=reduced_names)
def _local_extreme(call: LocalCall) -> Any:
    (value,), dims, names = call.operands, reduced_dims(call.call), sharded_dims(call)
    dtype = value.dtype
    if dtype is torch.bool:
        # The kernels of `max` take truth values, the collective does not.
        value = value.to(torch.uint8)
    if len(dims) != 1:  # all of them, as if they were one
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
    """A row-major index into the local dims `dims` as one into the whole dims."""
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
    """The extreme value of all ranks, and the first place that holds it."""
    emit, last = call.emit, math.prod(call.call.operands[0].shape)
    top = all_reduce_over(call, best, names, kind)
    # Behind all places of nan, and in front of no offer.
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
    """Gradient of max, min, median along a dim: where that dim is sharded, a rank fills in what falls to it."""
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
    # Compared, not scattered: indices of other ranks' stretches would point outside of this one.
    held = positions(call, f"d{dim}", shape[dim], gradient.device)
    return call.emit.where(index.eq(reshape_along(held, dim, len(shape))), gradient, 0)


# Norms of vectors: sums of powers, whose shards leave partial results or are put together from the shards' norms.

_PARTIAL = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}
"""Kind of partial that the norm of a shard is, for those orders where it is one."""


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
    """The number that does not change a norm: its power is zero, or it is never the least."""
    return math.inf if order < 0 else 0.0


@rule_maker("aten.dist")
def _dist(call: OpCall) -> Rule:
    """The norm of the difference of two tensors that are broadcast together."""
    order = _order(call)
    kind = _PARTIAL.get(order)
    equal = len({meta.shape for meta in call.operands}) == 1  # padding of both, at no distance
    fill = {"...": 0.0} if equal and order >= 0 else {}
    local = None if kind else _combine_norms
    return bind("..., ... -> ", call, reduce={"...": kind}, local=local, uneven=(), fill=fill)


def _combine_norms(call: LocalCall) -> Any:
    """The norm of all from the norms of the shards, which are summed up as powers."""
    # By the rule, not by `reduced_dims`: `dist` has no argument `dim`.
    kept = {index for dim in call.rule.results[0] or () for index in dim}
    reduced = (factor.base for index, factor in enumerate(call.rule.factors) if index not in kept)
    names = [name for name in dict.fromkeys(reduced) if call.axes(name)]
    if not names:
        return call.run()
    order = _order(call.call)
    # A power may be beyond the range of half precision though the norm is not.
    norm = call.run().to(accumulation_dtype(result_dtype(call)))
    total = all_reduce_over(call, norm.pow(order), names)
    return total.pow(1 / order).to(result_dtype(call))


# Mean and variance over sharded dims: every rank takes those of its part, and one gather joins them.
#
# Sums of squares minus the square of the sum would be one all-reduce, and lose all digits where the mean is large
# beside the deviations. Two passes, a sum first and then the squares of deviations from the mean, would be two. Moments
# of parts are joined as exactly by one gather. It takes as long as one of these while it has few numbers: on eight H100
# it is the faster way up to a hundred thousand means.
#
# Source: Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983): pairwise joins, shifted data.


def moments_exchange(means: int, dtype: torch.dtype) -> list[Exchange]:
    """Collectives of `joined_moments` when one factor is sharded.

    Args:
        means: how many there are.
        dtype: of what they are the means of.
    """
    return [("gather_of_each", 3 * means * accumulation_dtype(dtype).itemsize)]


def joined_moments(call: LocalCall, value: Any, layout: Sequence[str]) -> tuple[Any, Any]:
    """Mean and biased variance over dims of which the ranks hold parts, as exact as those of one device.

    Args:
        call: the call.
        value: what a rank holds. Padding along the factors of `layout` is zero.
        layout: for every dim of `value`, the factors that it is made of, such as `"k s0"`; `""` for dims that stay.

    Returns:
        Both in the dtype that sums are taken in, with one step along the dims that are reduced, equal on all ranks that
        share the factors.
    """
    factors = {index for dim in layout for name in dim.split() for index in call.rule.indices(name)}
    moments = _shard_moments(call, value, layout)
    for axis, choice in enumerate(call.choices):
        if choice in factors:
            moments = _combine_moments(call, moments, axis)
    origin, offset, variance = moments
    return origin + offset, variance


def _shard_moments(call: LocalCall, value: Any, layout: Sequence[str]) -> tuple[Any, Any, Any]:
    """Moments of a rank's part: an origin, how far the mean lies from it, and the biased variance.

    The origin is the first element, so that neither the mean nor its distance to those of other ranks is rounded as
    coarsely as the numbers themselves. Where all of the part is padding, the moments are zero.
    """
    dims = [dim for dim, factors in enumerate(layout) if factors]
    # The first element along the dims, kept as dims of size one.
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
    """Number of elements of a rank along some factors, padding left out: `[1]`, in the dtype of `like`."""
    emit, count = call.emit, None
    for name in names:
        ones = emit.full([call.size(name)], 1, dtype=like.dtype, device=like.device)
        steps = without_padded_steps(call, ones, [name]).sum([0], True)
        count = steps if count is None else count * steps
    return count


def _combine_moments(call: LocalCall, moments: tuple[Any, Any, Any], axis: int) -> tuple[Any, Any, Any]:
    """Moments of what the ranks of an axis have together, from those of each rank's part.

    The origin is the first rank's, which has something wherever any rank has.
    """
    emit, size = call.emit, call.mesh.sizes[axis]
    # One gather for all three: each has few numbers, and takes the time of a message.
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
    """The share of all elements that every rank of an axis has, to weigh values `[ranks, ...]`; None for equal shares.

    It differs where the axis pads its factor, or shares it: what other axes do with a rank's part, they do with those
    of all ranks of this one.
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
    above, below = _correction(call.call).as_integer_ratio()  # a size less a float would be a float, at every size
    left = max(0.0, (count * below - above) / below)
    # Joined moments are biased ones: of all elements.
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
