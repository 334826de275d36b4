"""Elements that are taken one after the other to fill the places of a mask.

Which element goes where is told by how many places of the mask come before: the mask must be whole, and everything
else may be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._positions import positions
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


@rule_maker("aten.masked_scatter")
def _masked_scatter(call: OpCall) -> Rule | None:
    """`self` with the elements of `source` in the places of the mask."""
    target, mask, source = call.operands
    if call.results[0] is None or call.results[0].shape != target.shape or not math.prod(source.shape):
        return None
    sizes = {f"d{dim}": size for dim, size in enumerate(target.shape)}
    dims = [[name] for name in sizes]
    masked, whole = _whole_dims("mask", mask.shape, sizes)
    taken, more = _whole_dims("source", source.shape, sizes)
    linear = [{0, 2}]
    return build(
        sizes,
        [dims, masked, taken],
        [dims],
        whole=[*whole, *more],
        contiguous=sizes,
        linear=linear,
        local=_local_masked_scatter,
        uneven=True,
    )


def _whole_dims(prefix: str, shape: Sequence[int], sizes: dict[str, int]) -> tuple[list[list[str]], list[str]]:
    """Dims of a tensor that must be whole, whose names and sizes are added to `sizes`; and these names."""
    names = [f"{prefix}{dim}" for dim in range(len(shape))]
    sizes |= dict(zip(names, shape, strict=True))
    return [[name] for name in names], names


def _local_masked_scatter(call: LocalCall) -> Any:
    shape = list(call.operand_shape(0))
    if shape == list(call.call.operands[0].shape):
        return call.run()
    emit, (target, mask, source) = call.emit, call.operands
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    source = emit.reshape(source, [-1])
    place = emit.clamp(place, 0, math.prod(call.call.operands[2].shape) - 1)
    return emit.where(held, emit.take(source, place), target)


def _local_places(call: LocalCall, mask: Any, whole: Sequence[int], shape: Sequence[int]) -> tuple[Any, Any]:
    """For every local element the number of places of the mask before it, and whether the mask holds it.

    Padding behind the end of a dim has the answers of the dim's last element.
    """
    emit = call.emit
    mask = emit.expand(mask, list(whole))
    places = emit.cumsum(emit.reshape(mask, [-1]), 0)
    places = emit.reshape(places - 1, list(whole))
    for dim, size in enumerate(shape):
        if call.axes(f"d{dim}"):
            own = positions(call, f"d{dim}", size, mask.device)
            own = emit.clamp_max(own, whole[dim] - 1)
            places, mask = (emit.index_select(value, dim, own) for value in (places, mask))
    return places, mask


@rule_maker("aten.masked_scatter_backward")
def _masked_scatter_backward(call: OpCall) -> Rule | None:
    """The gradient of the source: a shard of the incoming gradient gives its elements, and zeros for the others'."""
    gradient, mask = call.operands
    (result,) = call.results
    assert result is not None
    if mask.shape != gradient.shape:
        return None
    sizes = {f"d{dim}": size for dim, size in enumerate(gradient.shape)}
    dims = [[name] for name in sizes]
    masked, whole = _whole_dims("mask", mask.shape, sizes)
    taken, more = _whole_dims("source", result.shape, sizes)
    return build(
        sizes,
        [dims, masked],
        [taken],
        whole=[*whole, *more],
        contiguous=[name for names in dims for name in names],
        linear=[{0}],
        local=_local_masked_scatter_backward,
        uneven=True,
    )


def _local_masked_scatter_backward(call: LocalCall) -> Any:
    emit, (gradient, mask) = call.emit, call.operands
    shape, result = list(call.operand_shape(0)), list(call.result_shape())
    count = math.prod(result)
    place, held = _local_places(call, mask, call.call.operands[0].shape, shape)
    # What the mask does not hold goes to a spare element behind the end.
    place = emit.where(held, place, count)
    place = emit.clamp(place, None, count)
    spare = emit.new_zeros(gradient, [count + 1])
    flat = [emit.reshape(value, [-1]) for value in (place, gradient)]
    picked = emit.scatter_add(spare, 0, *flat)
    return emit.reshape(emit.slice(picked, 0, 0, count), result)
