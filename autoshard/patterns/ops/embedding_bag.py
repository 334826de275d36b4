"""Bags of embeddings that all have one size: sums and means of rows of a table.

Bags, vocabulary and embedding dim may be sharded; a rank that holds a stretch of the vocabulary adds up those rows of
every bag that it has.
"""

from __future__ import annotations

from typing import Any

from autoshard.capture.fixed_size_bags import MEAN
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, named_values
from autoshard.patterns.ops._positions import localize_index
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_OPERAND_DIMS = {"table": "v^ d", "indices": "b k!", "weights": "b k!", "grad": "b d"}


@rule_maker("autoshard::bags")
def bags(call: OpCall) -> Rule:
    """Sums or means of the rows of every bag; linear in the table."""
    # Rows of other ranks are read with a weight of zero, from the first of this rank's, which may be padding.
    return bind_named(call, _OPERAND_DIMS, ["b d"], linear=[{"table"}], local=_bags, uneven=("b", "d"), fill={"v": 0.0})


def _bags(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    values = named_values(call)
    indices, weights = _local_indices_and_weights(call, call.operand_shape(0)[0])
    result = call.run(operands=[values["table"], indices, weights], weights=weights, mode=0, padding=-1)
    if call.arg("mode") != MEAN:
        return result
    return result / _counts(call)


def _local_indices_and_weights(call: LocalCall, stretch: int) -> tuple[Any, Any]:
    values = named_values(call)
    indices, outside = localize_bag_indices(call, stretch, call.arg("padding"))
    dense = values["table"] if "table" in values else values["grad"]
    return indices, masked_weights(call, dense, values.get("weights"), outside)


def localize_bag_indices(call: LocalCall, stretch: int, padding: int) -> tuple[Any, Any]:
    """The operand `indices` as it counts in this rank's stretch of `v`, and which are of other ranks or padding."""
    emit, indices = call.emit, named_values(call)["indices"]
    place, outside = localize_index(call, indices, "v", stretch)
    if padding >= 0:
        outside = emit.logical_or(outside, emit.eq(indices, padding))
    return place, outside


def masked_weights(call: LocalCall, like: Any, weights: Any, outside: Any) -> Any:
    """Weights of rows, one where there are none, and zero for rows that do not count."""
    if weights is None:
        weights = call.emit.new_ones(like, list(outside.shape))
    return call.emit.masked_fill(weights, outside, 0.0)


def _counts(call: LocalCall) -> Any:
    """How many rows every bag has on all ranks, at least one: `[b, 1]`."""
    emit, values = call.emit, named_values(call)
    rows = emit.ne(values["indices"], call.arg("padding"))
    return emit.clamp_min(emit.sum(rows, [1], True), 1)


@rule_maker("autoshard::bags_backward")
def bags_backward(call: OpCall) -> Rule:
    """The gradient of the table: partial over bags, sharded over the vocabulary without communication."""
    return bind_named(call, _OPERAND_DIMS, ["v^ d"], linear=[{"grad"}], local=_bags_backward, uneven=True)


def _bags_backward(call: LocalCall) -> Any:
    rows = call.result_shape()[0]
    if not call.axes("v"):
        return call.run()
    values = named_values(call)
    indices, weights = _local_indices_and_weights(call, rows)
    gradient = values["grad"]
    if call.arg("mode") == MEAN:
        gradient = gradient / _counts(call)
    return call.emit.call(call.call.op, gradient, indices, weights, rows, 0, -1)


@rule_maker("autoshard::bags_weights_backward")
def bags_weights_backward(call: OpCall) -> Rule:
    """The gradient of the rows' weights: a product over the embedding dim."""
    linear = [{"grad"}, {"table"}]
    return bind_named(
        call, _OPERAND_DIMS, ["b k!"], linear=linear, local=_bags_weights_backward, uneven=("b", "d"), fill={"v": None}
    )


def _bags_weights_backward(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    values = named_values(call)
    values["indices"], outside = localize_bag_indices(call, values["table"].shape[0], call.arg("padding"))
    result = call.run(operands=list(values.values()), padding=-1)
    return call.emit.masked_fill(result, outside, 0.0)
