"""Norms of vectors: sums of powers, whose shards leave partial results or are put together from the shards' norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import accumulation_dtype, all_reduce_over, cast, result_dtype
from autoshard.patterns.ops.reduction import reduction_rule, sharded_dims
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule

_PARTIAL = {0.0: "sum", 1.0: "sum", math.inf: "max", -math.inf: "min"}
"""Kind of partial that the norm of a shard is, for those orders where it is one."""


def _order(call: OpCall) -> float:
    name = "ord" if call.op._schema.name == "aten::linalg_vector_norm" else "p"
    order = call.arg(name)
    return 2.0 if order is None else float(order)


@rule_maker("aten.linalg_vector_norm", "aten.norm")
def _norm(call: OpCall) -> Rule:
    order = _order(call)
    if order in _PARTIAL:
        return reduction_rule(call, kinds=(_PARTIAL[order],), fill=_neutral(order))
    assert call.results[0] is not None
    exchange = math.prod(call.results[0].shape) * accumulation_dtype(call.results[0].dtype).itemsize
    return reduction_rule(call, kinds=(None,), local=_local_norm, exchange=exchange, fill=_neutral(order))


def _neutral(order: float) -> float:
    """What does not change a norm: the power of it is zero, or it is never the least."""
    return math.inf if order < 0 else 0.0


def _local_norm(call: LocalCall) -> Any:
    return _combine_norms(call, sharded_dims(call))


@rule_maker("aten.dist")
def _dist(call: OpCall) -> Rule:
    """The norm of the difference of two tensors that are broadcast together."""
    order = _order(call)
    kind = _PARTIAL.get(order)
    equal = len({meta.shape for meta in call.operands}) == 1  # padding of both, at no distance
    fill = {"...": 0.0} if equal and order >= 0 else {}
    return bind("..., ... -> ", call, reduce={"...": kind}, local=None if kind else _local_dist, uneven=(), fill=fill)


def _local_dist(call: LocalCall) -> Any:
    return _combine_norms(call, [factor.name for factor in call.rule.factors])


def _combine_norms(call: LocalCall, names: Iterable[str]) -> Any:
    """The norm of all from the norms of the shards, which are summed up as powers."""
    names = [name for name in names if call.axes(name)]
    if not names:
        return call.run()
    emit, order = call.emit, _order(call.call)
    norm = cast(call, call.run(), accumulation_dtype(result_dtype(call)))
    total = all_reduce_over(call, emit.pow(norm, order), names)
    return cast(call, emit.pow(total, 1 / order), result_dtype(call))
