"""Sorting, searches in sorted tensors, and scans."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import (
    all_gather_stacked,
    all_reduce_over,
    argument_dim,
    bind_named,
    factor_names,
    numbered_dims,
    operand_names,
    reshape_along,
    result_dtype,
    same_dims_rule,
    stretch_start,
)
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, build


@rule_maker("aten.sort", "aten.argsort", "aten.cummax", "aten.cummin")
def _sort(call: OpCall) -> Rule:
    return same_dims_rule(call, [call.arg("dim")])


@rule_maker("aten.topk")
def _topk(call: OpCall) -> Rule:
    """The k largest of a sharded dim are among the k largest of every stretch, which ranks exchange.

    torch does not specify the choice among equal elements, and kernels choose by size and device: results may differ
    from one device where several elements equal the k-th.
    """
    shape = call.operands[0].shape
    if not shape:
        return same_dims_rule(call)
    sizes = numbered_dims(shape)
    name = list(sizes)[call.arg("dim")]
    target = ["top" if dim == name else dim for dim in sizes]
    return build(
        sizes | {"top": call.arg("k")},
        [list(sizes)],
        [target, target],
        whole=["top"],
        contiguous=[name],
        reductions={name: (None, None)},
        exchange={name: [("gather_of_each", meta.bytes) for meta in call.results if meta is not None]},
        local=_local_topk,
        # Not along the dim itself: elements may equal any number that pads it.
        uneven=[dim for dim in sizes if dim != name],
    )


def _local_topk(call: LocalCall) -> Any:
    shape = call.operand_shape(0)
    dim = argument_dim(call, len(shape))
    name = f"d{dim}"
    if not call.axes(name):
        return call.run()
    # A stretch may have fewer than k elements.
    values, places = call.run(k=min(call.arg("k"), shape[dim]))
    places = places + stretch_start(call, name, shape[dim])
    values, places = (_merge_rank_dim(all_gather_stacked(call, value, name), dim) for value in (values, places))
    values, chosen = call.run(operands=[values])
    return values, places.gather(dim, chosen)


def _merge_rank_dim(stacked: Any, dim: int) -> Any:
    """Merge the first dim of `[ranks, ..., n, ...]` into the dim `dim`: `[..., ranks * n, ...]`."""
    shape = list(stacked.shape)
    order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape))]
    ranks = shape.pop(0)
    shape[dim] *= ranks
    return stacked.permute(order).reshape(shape)


# The position of a value in a sorted tensor is the sum of its positions in all stretches.
rule("aten.bucketize.Tensor", "..., sorted -> ...")
rule("aten.bucketize.Scalar", "sorted -> ")


@rule_maker("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def _search_sorted(call: OpCall) -> Rule:
    """Sorted rows, one for all values or one for each row of them; with a sorter a row must be whole."""
    single = len(call.operands[0].shape) == 1
    rows = "sorted" if single else "... sorted"
    sorter = call.arg("sorter") is not None
    whole = ["sorted"] if sorter else []
    if call.op._schema.overload_name == "Scalar":
        return bind(f"{rows}, {rows} -> " if sorter else f"{rows} -> ", call, whole=whole)
    values = "..." if single else "... values"
    operands = [rows, values, rows] if sorter else [rows, values]
    return bind(f"{', '.join(operands)} -> {values}", call, whole=whole)


@rule_maker("aten.isin")
def _isin(call: OpCall) -> Rule:
    """Elements are independent; over test elements, the result is any, or all if inverted."""
    names = operand_names(call)
    tests = factor_names("t", len(call.operands[-1].shape)) if names[-1] == "test_elements" else []
    return bind_named(
        call,
        {"elements": "...", "test_elements": " ".join(tests)},
        ["..." if "elements" in names else ""],
        reduce=dict.fromkeys(tests),
        exchange=dict.fromkeys(tests, call.result.bytes),
        local=_local_isin,
        uneven=("...",),
    )


def _local_isin(call: LocalCall) -> Any:
    held = call.run()
    names = [factor.name for factor in call.rule.factors if factor.name.startswith("t") and call.axes(factor.name)]
    if not names:
        return held
    # Collectives do not reduce booleans. Reduce them as integers: max is any, min is all.
    kind = "min" if call.arg("invert") else "max"
    return all_reduce_over(call, held.to(torch.uint8), names, kind).to(torch.bool)


@rule_maker("aten.histc")
def _histc(call: OpCall) -> Rule | None:
    """Counts are partial sums for given bounds; without bounds, bins depend on the extremes of all elements."""
    if call.arg("min") == call.arg("max"):
        return None
    return bind("... -> bins!", call, fill={"...": call.arg("max") + 1})  # in no bin, and not counted


# Scans: cumulative sums, products and the like.
#
# Each rank scans its stretch of a sharded dim. The last element of a stretch is its total; ranks exchange totals, and
# each combines those of the stretches before its own.


@dataclass(frozen=True, slots=True)
class _Scan:
    """How totals of stretches are combined.

    Attributes:
        neutral: the neutral element.
        join: combines two totals.
        fold: combines all along the first dim.
    """

    neutral: float
    join: Callable[[Any, Any], Any]
    fold: Callable[[Any], Any]


_LOGARITHM = _Scan(
    -math.inf,
    lambda first, second: first.emit.logaddexp(first, second),
    lambda totals: totals.logsumexp([0]),
)
_SCANS = {
    "aten::cumsum": _Scan(0, operator.add, lambda totals: totals.sum([0])),
    "aten::cumprod": _Scan(1, operator.mul, lambda totals: totals.prod(0)),
    "aten::logcumsumexp": _LOGARITHM,
    "aten::_logcumsumexp": _LOGARITHM,
}


@rule_maker(*_SCANS)
def _scan(call: OpCall) -> Rule:
    shape, scan = call.operands[0].shape, _SCANS[call.name]
    linear = [{0}] if call.name == "aten::cumsum" else []
    if not shape or (call.result.dtype.is_complex and scan is _LOGARITHM):  # no operator combines complex logarithms
        return same_dims_rule(call, [call.arg("dim")], linear=linear)
    name = f"d{argument_dim(call, len(shape))}"
    exchange = {name: [("gather_of_each", call.result.bytes // max(1, shape[call.arg("dim")]))]}
    return same_dims_rule(
        call,
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
    dim = argument_dim(call, len(shape))
    name = f"d{dim}"
    if not shape or not call.axes(name):
        return scanned
    scan = _SCANS[call.call.name]
    totals = all_gather_stacked(call, scanned.select(dim, -1), name)
    ranks = reshape_along(emit.arange(call.share(name), device=scanned.device), 0, len(shape))
    # Fold all totals, with those from this stretch on replaced by the neutral element: no branch on the rank.
    start = scan.fold(emit.where(ranks < call.position(name), totals, scan.neutral))
    return scan.join(scanned, start.to(result_dtype(call)).unsqueeze(dim))
