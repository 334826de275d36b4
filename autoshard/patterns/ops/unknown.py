"""The rule of an operator that nobody wrote a rule for: it runs whole on every rank; and a rule that it may have."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.specs.emitter import collectives

aten = torch.ops.aten


def whole_rule(call: OpCall) -> Rule:
    """Everything replicated. What an operator draws at random, every rank has from the first."""

    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    operands = tuple(((),) * len(meta.shape) for meta in call.operands)
    results = tuple(None if meta is None else ((),) * len(meta.shape) for meta in call.results)
    return Rule((), operands, results, local=_keep_first_rank_results if draws else None)


def batch_rule(call: OpCall) -> str:
    """The rule in text of an operator whose samples, the steps of dim 0, are independent; empty where there is none.

    Whether they are, only who wrote the operator can say. Dims count as samples that are as long as dim 0 of the first
    result, or of the first operand where that result has no dims; a result without samples is a sum over them.
    """
    tensors = [*call.results, *call.operands]
    size = next((meta.shape[0] for meta in tensors if meta is not None and meta.shape), 1)
    if size == 1 or any(meta is None for meta in call.results):
        return ""
    names = (f"d{number}!" for number in itertools.count())

    def item(meta: TensorMeta | None) -> str:
        shape = () if meta is None else meta.shape
        return " ".join("b" if dim == 0 and length == size else next(names) for dim, length in enumerate(shape))

    operands, results = (", ".join(map(item, metas)) for metas in (call.operands, call.results))
    return f"{operands} -> {results}" if "b" in operands.replace(",", "").split() else ""


def batch_advice(name: str, rule: str) -> str:
    """Advice for the user of an operator without a rule, given its `batch_rule`."""
    if not rule:
        return f'Register one with autoshard.register_rule("{name}", "..."), see docs/rules.md.'
    return (
        f'If samples, the steps of dim 0, are independent, autoshard.register_rule("{name}", "{rule}") splits the '
        "batch (results without samples are summed over the parts); see docs/rules.md."
    )


def _keep_first_rank_results(call: LocalCall) -> Any:
    """Run the operator on every rank, and keep the first rank's results: the others' generators are not like its."""
    results = call.run()
    if not isinstance(results, tuple):
        return _broadcast_from_first(call, results)
    return tuple(None if result is None else _broadcast_from_first(call, result) for result in results)


def _broadcast_from_first(call: LocalCall, value: Any) -> Any:
    """The value that the rank at coordinate zero of every axis has: a sum in which the others hold zero."""
    emit = call.emit
    dtype = value.dtype
    if dtype is torch.bool:  # truth values do not add up
        value = value.to(torch.uint8)
    for axis, size in enumerate(call.mesh.sizes):
        if size > 1:
            first = emit.coordinate(axis).eq(0)
            # `where`, not a product: what is no number on another rank must not become a summand.
            kept = emit.where(first, value, emit.zeros_like(value))
            value = emit.collective(collectives.all_reduce.default, kept, "sum", axis=axis)
    return value.to(dtype)
