"""The rule of an operator that nobody wrote a rule for: it runs whole on every rank."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.local import LocalCall, all_reduce
from autoshard.patterns.rule import Dims, OpCall, Rule, TensorMeta

aten = torch.ops.aten


def whole_rule(call: OpCall) -> Rule:
    """Everything replicated. What an operator draws at random, every rank has from the first."""

    def whole(meta: TensorMeta | None) -> Dims | None:
        return None if meta is None else ((),) * len(meta.shape)

    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    operands = tuple(((),) * len(meta.shape) for meta in call.operands)
    return Rule((), operands, tuple(whole(meta) for meta in call.results), local=_drawn_by_the_first if draws else None)


def _drawn_by_the_first(call: LocalCall) -> Any:
    """Run the operator on every rank, and keep the first rank's results: the others' generators are not like its."""
    results = call.run()
    if not isinstance(results, tuple):
        return _of_the_first(call, results)
    return tuple(None if result is None else _of_the_first(call, result) for result in results)


def _of_the_first(call: LocalCall, value: Any) -> Any:
    """The value that the rank at coordinate zero of every axis has: a sum in which the others hold zero."""
    emit = call.emit
    dtype = emit.dtype(value)
    if dtype is torch.bool:
        value = emit.call(aten._to_copy.default, value, dtype=torch.uint8)
    for axis, size in enumerate(call.mesh.sizes):
        if size > 1:
            first = emit.call(aten.eq.Scalar, emit.coordinate(axis), 0)
            kept = emit.call(aten.where.self, first, value, emit.call(aten.zeros_like.default, value))
            value = all_reduce(emit, kept, axis)
    return emit.call(aten._to_copy.default, value, dtype=dtype) if dtype is torch.bool else value
