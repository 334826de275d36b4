"""Embeddings: rows of tables by index, and sums, means and maxima of bags of them.

The vocabulary may be sharded. A rank looks up the indices within its stretch and returns zeros for the others: the sum
over ranks is the embedding (vocabulary parallelism, as for a sharded table in Whale 3.2.2).
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import (
    bind_named,
    factor_names,
    if_sharded,
    local_positions,
    localize_index,
    named_values,
    shape_of,
)
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.embedding")
def embedding(call: OpCall) -> Rule:
    """Table rows; linear in the table."""
    # Indices never point at padding of the table.
    return bind("v^ d, ... -> ... d", call, linear="0", local=_embedding, uneven=("d", "..."), fill={"v": None})


@if_sharded("v")
def _embedding(call: LocalCall) -> Any:
    table, indices = call.operands
    indices, outside = localize_index(call, indices, "v", call.operand_shape(0)[0])
    return call.run(operands=[table, indices]).masked_fill(outside.unsqueeze(-1), 0)


@rule_maker("aten.embedding_dense_backward")
def embedding_dense_backward(call: OpCall) -> Rule:
    """The gradient of the table: partial over the indices, sharded over the vocabulary without communication."""
    counted = call.arg("scale_grad_by_freq")  # frequencies count all indices
    return bind(
        "... d, ... -> v^ d",
        call,
        linear="0",
        whole=("...", "v") if counted else (),
        local=_embedding_dense_backward,
        uneven=True,
    )


@if_sharded("v")
def _embedding_dense_backward(call: LocalCall) -> Any:
    gradient, indices = call.operands
    stretch = call.result_shape()[0]
    local, skipped = local_positions(call, indices, "v", stretch)
    if call.arg("padding_idx") >= 0:
        skipped = skipped.logical_or(indices.eq(call.arg("padding_idx")))
    # The operator skips the padding index: set all indices of other ranks to it.
    return call.run(operands=[gradient, local.masked_fill(skipped, -1)], num_weights=stretch, padding_idx=-1)


# ATen's bags of embeddings: concatenated in one dim, with offsets.
#
# The dim of bags is whole, since a shard could not tell where its bags begin. The embedding dim may be sharded, and so
# may the vocabulary, except for maxima: a rank sums the rows of every bag within its stretch of the vocabulary.

_SUM, _MEAN, _MAX = 0, 1, 2  # what ATen's `mode` arguments mean
_OFFSET_DIMS = {
    "weight": "v^ d",
    "indices": "i!",
    "per_sample_weights": "i!",
    "offsets": "o!",
    "offset2bag": "x!",
    "bag_size": "y!",
    "grad": "b! d",
}
"""Dims by the names of arguments; those of `maximum_indices` depend on the mode."""


def _maxima_dims(shape: tuple[int, ...]) -> str:
    return "b! d" if len(shape) == 2 else "z!"


@rule_maker("aten._embedding_bag", "aten._embedding_bag_forward_only")
def offset_bags(call: OpCall) -> Rule:
    """Forward: sums, means or maxima of rows, and the indices of bags, which are the same for all columns."""
    maxima = call.results[3]
    assert maxima is not None
    return bind_named(
        call,
        _OFFSET_DIMS,
        ["b! d", "x!", "y!", _maxima_dims(maxima.shape)],
        reduce={"d": None, "v": ("sum", None, None, None)},
        whole=("v",) if call.arg("mode") == _MAX else (),
        local=_offset_bags,
        # Rows of other ranks are read as this rank's first row, which may be padding, with weight 0.
        fill={"d": None, "v": 0.0},
    )


@if_sharded("v")
def _offset_bags(call: LocalCall) -> Any:
    emit, values = call.emit, named_values(call)
    table, offsets = values["weight"], values["offsets"]
    last, padding = call.arg("include_last_offset"), call.arg("padding_idx")
    place, outside = localize_bag_indices(call, call.operand_shape(0)[0], padding)
    weights = masked_weights(call, table, values.get("per_sample_weights"), outside)
    sums = emit.call(call.call.op, table, place, offsets, False, _SUM, False, weights, last, -1)[0]
    # The indices of bags do not depend on the table: use one of two rows, for padding and for everything else.
    tiny, is_padding = table.new_zeros([2, 1]), values["indices"].eq(padding).to(torch.int64)
    settings = (False, call.arg("mode"), False, values.get("per_sample_weights"), last, 1 if padding >= 0 else -1)
    _, *apart = emit.call(call.call.op, tiny, is_padding, offsets, *settings)
    if call.arg("mode") == _MEAN:
        sums = sums / apart[1].slice(0, 0, sums.shape[0]).clamp_min(1).unsqueeze(1)
    return (sums, *apart)


@rule_maker("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward")
def offset_bags_backward(call: OpCall) -> Rule | None:
    """The gradient of the table, unless it is asked for as a sparse tensor."""
    if "dense" not in call.name and call.arg("sparse"):
        return None
    counted = call.arg("scale_grad_by_freq")  # frequencies count all indices
    items = _OFFSET_DIMS | {"maximum_indices": _maxima_dims(shape_of(call, "maximum_indices"))}
    whole = ("v",) if counted or call.arg("mode") == _MAX else ()
    return bind_named(call, items, ["v^ d"], linear=[{"grad"}], whole=whole, local=_offset_bags_backward, uneven=True)


@if_sharded("v")
def _offset_bags_backward(call: LocalCall) -> Any:
    values, rows = named_values(call), call.result_shape()[0]
    bag = _bag_of_index(call)
    gradient = values["grad"].index_select(0, bag)
    if call.arg("mode") == _MEAN:
        gradient = gradient / values["bag_size"].clamp_min(1).index_select(0, bag).unsqueeze(1)
    if "per_sample_weights" in values:
        gradient = gradient * values["per_sample_weights"].unsqueeze(1)
    place, outside = localize_bag_indices(call, rows, call.arg("padding_idx"))
    return gradient.embedding_dense_backward(place.masked_fill(outside, -1), rows, -1, False)  # which skips -1


def _bag_of_index(call: LocalCall) -> Any:
    """The bag of every index; computed where kernels do not return it."""
    values = named_values(call)
    if "offsets" not in values:
        return values["offset2bag"]
    offsets, indices = values["offsets"], values["indices"]
    order = call.emit.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    return offsets.searchsorted(order, right=True) - 1


# Weights of rows, for both kinds of bags.


def localize_bag_indices(call: LocalCall, stretch: int, padding: int) -> tuple[Any, Any]:
    """Return the indices relative to this rank's stretch of `v`, and a mask of those of other ranks and of padding."""
    indices = named_values(call)["indices"]
    place, outside = localize_index(call, indices, "v", stretch)
    if padding >= 0:
        outside = outside.logical_or(indices.eq(padding))
    return place, outside


def masked_weights(call: LocalCall, like: Any, weights: Any, outside: Any) -> Any:
    """Return the weights of rows: 1 by default, and 0 for rows `outside`."""
    if weights is None:
        weights = like.new_ones(list(outside.shape))
    return weights.masked_fill(outside, 0.0)


@rule_maker("aten._embedding_bag_per_sample_weights_backward", dims=_OFFSET_DIMS, result="i!", uneven=("d",))
def bags_weights_backward(call: OpCall, dims: dict[str, str], result: str, uneven: tuple[str, ...]) -> Rule:
    """The gradient of the rows' weights: a product over the embedding dim."""
    linear, local = [{"grad"}, {"table", "weight"}], _bags_weights_backward
    return bind_named(call, dims, [result], linear=linear, local=local, uneven=uneven, fill={"v": None})


@if_sharded("v")
def _bags_weights_backward(call: LocalCall) -> Any:
    """The gradient from this rank's rows; zero for the others."""
    table, padding = ("table", "padding") if call.call.op.namespace == "autoshard" else ("weight", "padding_idx")
    values = named_values(call)
    values["indices"], outside = localize_bag_indices(call, values[table].shape[0], call.arg(padding))
    # Padding is part of `outside`, so no index is padding any more.
    return call.run(operands=list(values.values()), **{padding: -1}).masked_fill(outside, 0.0)


# Reductions of segments of a dim: the dim and the segments are whole, all other dims are batch dims.


@rule_maker("aten.segment_reduce", "aten._segment_reduce_backward")
def _segments(call: OpCall) -> Rule | None:
    """Segments are given by lengths, or by offsets, which are one more; segments by index are replicated."""
    backward = call.name == "aten::_segment_reduce_backward"
    if not backward and call.arg("indices") is not None:
        return None
    data = call.arg("data")
    axis = call.arg("axis") % len(data.shape)
    before, after = factor_names("b", axis), factor_names("d", len(data.shape) - axis - 1)
    elements, reduced, lengths, ends = (
        " ".join([*before, *names]) for names in (["n!", *after], ["s!", *after], ["s!"], ["ends!"])
    )
    sums = call.arg("reduce") in ("sum", "mean") and call.arg("initial") is None
    return bind_named(
        call,
        {"data": elements, "grad": reduced, "output": reduced, "lengths": lengths, "offsets": ends},
        [elements if backward else reduced],
        linear=[{"grad"}] if backward else [{"data"}] if sums else [],
        uneven=after,  # lengths in padding would have to add up
    )
