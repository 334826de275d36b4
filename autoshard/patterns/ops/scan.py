"""Scans: sums, products and the like of all that stands before.

A sharded dim is scanned stretch by stretch. The last element of a stretch is its total; the ranks exchange these, and
each puts together the totals that stand in front of its own stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import aten, cast, result_dtype
from autoshard.patterns.ops._positions import all_gather_stacked
from autoshard.patterns.ops.sorting import kept_dims_rule
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@dataclass(frozen=True, slots=True)
class _Scan:
    """How totals go together.

    Attributes:
        neutral: the total of nothing.
        join: operator that joins two totals.
        fold: joins all along the first dim.
    """

    neutral: float
    join: Any
    fold: Callable[[LocalCall, Any], Any]


_SUM = _Scan(0, aten.add.Tensor, lambda call, totals: call.emit.sum(totals, [0]))
_PRODUCT = _Scan(1, aten.mul.Tensor, lambda call, totals: call.emit.prod(totals, 0))
_LOGARITHM = _Scan(-math.inf, aten.logaddexp.default, lambda call, totals: call.emit.logsumexp(totals, [0]))
_SCANS = {
    "aten::cumsum": _SUM,
    "aten::cumprod": _PRODUCT,
    "aten::logcumsumexp": _LOGARITHM,
    "aten::_logcumsumexp": _LOGARITHM,
}


@rule_maker("aten.cumsum", "aten.cumprod", "aten.logcumsumexp", "aten._logcumsumexp")
def _scan(call: OpCall) -> Rule:
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    linear = [{0}] if call.op._schema.name == "aten::cumsum" else []
    scan = _SCANS[call.op._schema.name]
    if not operand.shape or (result.dtype.is_complex and scan is _LOGARITHM):  # no operator joins complex logarithms
        return kept_dims_rule(call, [call.arg("dim") % len(operand.shape)] if operand.shape else [], linear)
    name = f"d{call.arg('dim') % len(operand.shape)}"
    sizes = {f"d{dim}": size for dim, size in enumerate(operand.shape)}
    dims = [[each] for each in sizes]
    total = result.bytes // max(1, sizes[name])
    exchange = {name: [("gather_of_each", total)]}
    return build(
        sizes,
        [dims],
        [dims],
        contiguous=[name],
        exchange=exchange,
        linear=linear,
        local=_local_scan,
        uneven=True,
        fill={name: scan.neutral},
    )


def _local_scan(call: LocalCall) -> Any:
    emit, scanned = call.emit, call.run()
    shape = call.result_shape()
    dim = call.arg("dim") % len(shape) if shape else 0
    name = f"d{dim}"
    if not shape or not call.axes(name):
        return scanned
    scan = _SCANS[call.call.op._schema.name]
    totals = all_gather_stacked(call, emit.select(scanned, dim, -1), name)
    ranks = emit.arange(call.share(name), device=scanned.device)
    ranks = emit.reshape(ranks, [-1] + [1] * (len(shape) - 1))
    before = ranks < call.position(name)
    start = scan.fold(call, emit.where(before, totals, scan.neutral))
    start = emit.unsqueeze(cast(call, start, result_dtype(call)), dim)
    return emit.call(scan.join, scanned, start)


@rule_maker("aten.cummax", "aten.cummin")
def _extremes(call: OpCall) -> Rule:
    ndim = len(call.operands[0].shape)
    return kept_dims_rule(call, [call.arg("dim") % ndim] if ndim else [])
