"""Operators that make tensors out of nothing, or out of another tensor's shape."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.zeros", "aten.ones", "aten.full", "aten.empty.memory_format", "aten.scalar_tensor")
def _filled(call: OpCall) -> Rule:
    """The same everywhere: every dim is a factor that only the result has, made at its local size."""
    (result,) = call.results
    assert result is not None
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    return build(sizes, [], [[[name] for name in sizes]], local=_local_size if sizes else None)


def _local_size(call: LocalCall) -> Any:
    return call.run(size=list(call.result_shape()))


rule("aten.zeros_like", "... -> ...", linear="0")
rule(["aten.ones_like", "aten.full_like", "aten.empty_like"], "... -> ...")


@rule_maker("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")
def _new(call: OpCall) -> Rule:
    """Only the dtype of the operand matters, so it may lie in any way: dims of equal size lie alike."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    target = [[name] for name in sizes]
    source = []
    for dim, size in enumerate(operand.shape):
        if dim < len(result.shape) and result.shape[dim] == size:
            source.append([f"d{dim}"])
        else:
            sizes[f"operand{dim}"] = size
            source.append([f"operand{dim}"])
    own = {f"operand{dim}": (None,) for dim in range(len(operand.shape))}
    linear = [{0}] if call.op._schema.name == "aten::new_zeros" else []
    return build(sizes, [source], [target], reductions=own, linear=linear, local=_local_new)


def _local_new(call: LocalCall) -> Any:
    if call.call.op == torch.ops.aten.new_empty_strided.default:  # strides are those of the whole tensor
        return call.emit.call(torch.ops.aten.new_empty.default, call.operands[0], list(call.result_shape()))
    return call.run(size=list(call.result_shape()))


@rule_maker(
    "aten.arange",
    "aten.eye",
    "aten.linspace",
    "aten.logspace",
    "aten.tril_indices",
    "aten.triu_indices",
    "prims.iota",
)
def _positions(call: OpCall) -> Rule | None:
    """Elements that depend on their position: made whole; slicing a constant costs nothing."""
    if call.operands:
        return None
    (result,) = call.results
    assert result is not None
    sizes = {f"d{dim}": size for dim, size in enumerate(result.shape)}
    return build(sizes, [], [[[name] for name in sizes]], whole=sizes)
