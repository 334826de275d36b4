"""ATen's bags of embeddings, which lie one after another in one dim, each as long as the offsets say.

Bags stay together, since no shard could tell where its own begin. Embedding dim and, but for maxima, vocabulary may be
sharded: a rank that holds a stretch of the vocabulary adds up those rows of every bag that it has.
"""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, cast, named_values, shape_of
from autoshard.patterns.ops.embedding_bag import localize_bag_indices, masked_weights
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_SUM, _MEAN, _MAX = 0, 1, 2  # what ATen's `mode` arguments mean
_OPERAND_DIMS = {
    "weight": "v^ d",
    "indices": "i!",
    "per_sample_weights": "i!",
    "offsets": "o!",
    "offset2bag": "x!",
    "bag_size": "y!",
    "grad": "b! d",
}
"""Dims by the names of arguments; those of `maximum_indices` depend on the mode."""


def _maxima(shape: tuple[int, ...]) -> str:
    return "b! d" if len(shape) == 2 else "z!"


@rule_maker("aten._embedding_bag", "aten._embedding_bag_forward_only")
def bags(call: OpCall) -> Rule:
    """Forward: the rows' sums, means or maxima, and what tells bags apart, which is the same for all columns."""
    assert call.results[3] is not None
    maxima = _maxima(call.results[3].shape)
    return bind_named(
        call,
        _OPERAND_DIMS,
        ["b! d", "x!", "y!", maxima],
        reduce={"d": None, "v": ("sum", None, None, None)},
        whole=("v",) if call.arg("mode") == _MAX else (),
        local=_bags,
        # Rows of other ranks are read with a weight of zero, from the first of this rank's, which may be padding.
        fill={"d": None, "v": 0.0},
    )


def _bags(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    emit, values = call.emit, named_values(call)
    table, offsets = values["weight"], values["offsets"]
    last, padding = call.arg("include_last_offset"), call.arg("padding_idx")
    place, outside = localize_bag_indices(call, call.operand_shape(0)[0], padding)
    weights = masked_weights(call, table, values.get("per_sample_weights"), outside)
    sums = emit.call(call.call.op, table, place, offsets, False, _SUM, False, weights, last, -1)[0]
    # What tells bags apart does not depend on the table: one of two rows, for padding and for all else, does as well.
    is_padding = emit.eq(values["indices"], padding)
    tiny = emit.new_zeros(table, [2, 1])
    settings = (False, call.arg("mode"), False, values.get("per_sample_weights"), last, 1 if padding >= 0 else -1)
    _, *apart = emit.call(call.call.op, tiny, cast(call, is_padding, torch.int64), offsets, *settings)
    if call.arg("mode") == _MEAN:
        counts = emit.slice(apart[1], 0, 0, sums.shape[0])
        sums = sums / _column(call, emit.clamp_min(counts, 1))
    return (sums, *apart)


def _column(call: LocalCall, value: Any) -> Any:
    return call.emit.unsqueeze(value, 1)


@rule_maker("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward")
def bags_backward(call: OpCall) -> Rule | None:
    """The gradient of the table, unless it is asked for as a sparse tensor."""
    if "dense" not in call.op.name() and call.arg("sparse"):
        return None
    counted = call.arg("scale_grad_by_freq")  # the frequency of a word is that among all indices
    items = _OPERAND_DIMS | {"maximum_indices": _maxima(shape_of(call, "maximum_indices"))}
    whole = ("v",) if counted or call.arg("mode") == _MAX else ()
    return bind_named(call, items, ["v^ d"], linear=[{"grad"}], whole=whole, local=_bags_backward, uneven=True)


def _bags_backward(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    emit, values, rows = call.emit, named_values(call), call.result_shape()[0]
    bag = _bag_of_index(call)
    gradient = emit.index_select(values["grad"], 0, bag)
    if call.arg("mode") == _MEAN:
        counts = emit.clamp_min(values["bag_size"], 1)
        counts = emit.index_select(counts, 0, bag)
        gradient = gradient / _column(call, counts)
    if "per_sample_weights" in values:
        gradient = gradient * _column(call, values["per_sample_weights"])
    place, outside = localize_bag_indices(call, rows, call.arg("padding_idx"))
    place = emit.masked_fill(place, outside, -1)  # which the operator skips
    return emit.embedding_dense_backward(gradient, place, rows, -1, False)


def _bag_of_index(call: LocalCall) -> Any:
    """The number of the bag that every index is in; kernels that need it not leave it out of their results."""
    emit, values = call.emit, named_values(call)
    if "offsets" not in values:
        return values["offset2bag"]
    count, device = values["indices"].shape[0], values["indices"].device
    order = emit.arange(count, dtype=values["offsets"].dtype, device=device)
    bag = emit.searchsorted(values["offsets"], order, right=True)
    return bag - 1


@rule_maker("aten._embedding_bag_per_sample_weights_backward")
def bags_weights_backward(call: OpCall) -> Rule:
    """The gradient of the rows' weights: a product over the embedding dim."""
    linear = [{"grad"}, {"weight"}]
    return bind_named(
        call, _OPERAND_DIMS, ["i!"], linear=linear, local=_bags_weights_backward, uneven=("d",), fill={"v": None}
    )


def _bags_weights_backward(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    values = named_values(call)
    values["indices"], outside = localize_bag_indices(call, values["weight"].shape[0], call.arg("padding_idx"))
    result = call.run(operands=list(values.values()), padding_idx=-1)
    return call.emit.masked_fill(result, outside, 0.0)
