"""One element of a dim: taken out, put back, or all of them.

Where the dim is sharded, one rank holds the element. Taken out, it is a partial sum in which the others have zeros; put
back, it is that rank's to write.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _dim_rule(
    call: OpCall, having: Collection[int], results: bool, linear: Sequence[set[int]], *, split: bool, **options: Any
) -> Rule:
    """A dim that some tensors have and others lack.

    Args:
        having: the operands that have the dim.
        results: whether the results have it.
        split: whether it may be sharded, in whole stretches.
    """
    full = call.results[0] if results else call.operands[0]
    assert full is not None
    dim = call.arg("dim") % len(full.shape)
    sizes = {f"d{index}": size for index, size in enumerate(full.shape)}
    long = [[name] for name in sizes]
    short = long[:dim] + long[dim + 1 :]
    operands = [long if position in having else short for position in range(len(call.operands))]
    targets = [long if results else short] * len(call.results)
    name = [f"d{dim}"]
    options |= {"uneven": True, "fill": dict.fromkeys(name)}  # padding is never the element
    return build(sizes, operands, targets, whole=[] if split else name, contiguous=name, linear=linear, **options)


@rule_maker("aten.select.int")
def _select(call: OpCall) -> Rule:
    adds_up = call.operands[0].dtype is not torch.bool
    return _dim_rule(call, [0], False, [{0}], split=adds_up, local=_local_select, free=True)


def _locate_element(call: LocalCall, shape: Sequence[int], whole: Sequence[int]) -> tuple[int, Any]:
    """The element's index in the local dim of the rank that holds it, and whether this rank does; None if all do."""
    dim = call.arg("dim") % len(shape)
    index = call.arg("index") % whole[dim]
    if not call.axes(f"d{dim}"):
        return index, None
    owner, place = divmod(index, shape[dim])
    return place, call.emit.eq(call.position(f"d{dim}"), owner)


def _local_select(call: LocalCall) -> Any:
    place, owned = _locate_element(call, call.operand_shape(0), call.call.operands[0].shape)
    taken = call.run(index=place)
    return taken if owned is None else call.emit.where(owned, taken, 0)


@rule_maker("aten.select_backward")
def _select_backward(call: OpCall) -> Rule:
    return _dim_rule(call, [], True, [{0}], split=True, local=_local_select_backward)


def _local_select_backward(call: LocalCall) -> Any:
    shape = call.result_shape()
    assert call.call.results[0] is not None
    place, owned = _locate_element(call, shape, call.call.results[0].shape)
    gradient = call.run(index=place, input_sizes=list(shape))
    return gradient if owned is None else call.emit.where(owned, gradient, 0)


@rule_maker("aten.select_scatter")
def _select_scatter(call: OpCall) -> Rule:
    return _dim_rule(call, [0], True, [{0, 1}], split=True, local=_local_select_scatter)


def _local_select_scatter(call: LocalCall) -> Any:
    place, owned = _locate_element(call, call.operand_shape(0), call.call.operands[0].shape)
    written = call.run(index=place)
    return written if owned is None else call.emit.where(owned, written, call.operands[0])


@rule_maker("aten.unbind")
def _unbind(call: OpCall) -> Rule:
    return _dim_rule(call, [0], False, [{0}], split=False, free=True)


@rule_maker("aten.stack")
def _stack(call: OpCall) -> Rule:
    return _dim_rule(call, [], True, [set(range(len(call.operands)))], split=False)
