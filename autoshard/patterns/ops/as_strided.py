"""`as_strided` and its reverse, which look at how the whole tensor lies in memory.

Most uses are a plain view in other words: memory, cut in dims of decreasing stride, of which each is taken in whole or
in part, in another order, or repeated. Such a call is written as that view, whose factors may be sharded. Any other is
run whole on memory laid out as the call expects it, whatever the local tensors came to look like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.patterns.view_factors import factor_view


def memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The dims of a tensor in the order in which they lie in memory; None if it leaves gaps or overlaps itself."""
    if meta.strides is None:
        return None
    strides = meta.strides
    order = sorted(range(len(meta.shape)), key=lambda dim: (meta.shape[dim] != 1, -strides[dim]))
    expected = 1
    for dim in reversed(order):
        if meta.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= meta.shape[dim]
    return tuple(order)


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided view of memory as a view, cut in parts.

    Attributes:
        radices: memory as a tensor of so many dims, in order; the last is what is skipped between elements.
        starts: where the part that is taken of each of these begins.
        dims: the dims of the result that these are, without the last; all other dims have size one or repeat.
    """

    radices: tuple[int, ...]
    starts: tuple[int, ...]
    dims: tuple[int, ...]


def strided_view(count: int, size: Sequence[int], stride: Sequence[int], offset: int) -> StridedView | None:
    """The view of `count` elements in memory that `as_strided(size, stride, offset)` is; None where it is none."""
    dims = sorted((dim for dim in range(len(size)) if size[dim] > 1 and stride[dim] > 0), key=lambda dim: -stride[dim])
    radices, starts, left, rest = [], [], count, offset
    for dim in dims:
        if left % stride[dim]:
            return None
        radices.append(left // stride[dim])
        starts.append(rest // stride[dim])
        left, rest = stride[dim], rest % stride[dim]
        if starts[-1] + size[dim] > radices[-1]:
            return None
    return StridedView((*radices, left), (*starts, rest), tuple(dims))


class _StridedFactors:
    """The factors of a strided view.

    Attributes:
        order: the operand's dims in the order in which they lie in memory.
        strided: memory cut in radices.
        sizes: size of every factor.
        whole: factors that can't be sharded.
        source: dims of the operand.
        radices: dims of memory, cut.
        result: dims of the view.
    """

    def __init__(self, shape: Sequence[int], order: Sequence[int], strided: StridedView, size: Sequence[int]) -> None:
        view = factor_view(tuple(shape[dim] for dim in order), strided.radices)
        names = [f"f{index}" for index in range(len(view.sizes))]
        self.order, self.strided = order, strided
        self.sizes = dict(zip(names, view.sizes, strict=True))
        self.radices = [[names[factor] for factor in factors] for factors in view.target]
        self.whole = [name for name, free in zip(names, view.shardable, strict=True) if not free] + self.radices[-1]
        self.source: list[list[str]] = [[] for _ in shape]
        for dim, factors in zip(order, view.source, strict=True):
            self.source[dim] = [names[factor] for factor in factors]
        self.result: list[list[str]] = [[f"repeated{dim}"] for dim in range(len(size))]
        self.sizes |= {f"repeated{dim}": extent for dim, extent in enumerate(size) if dim not in strided.dims}
        for dim, names, radix in zip(strided.dims, self.radices, strided.radices, strict=False):
            self.result[dim] = names
            if size[dim] != radix:  # taken in part
                self.result[dim] = [f"part{dim}"]
                self.sizes[f"part{dim}"] = size[dim]
                self.whole += [f"part{dim}", *names]

    def memory(self, call: LocalCall) -> Any:
        """The local operand as memory, cut in radices of local size."""
        value = call.emit.permute(call.operands[0], list(self.order))
        shape = [math.prod(call.size(name) for name in names) for names in self.radices]
        return call.emit.reshape(value, shape)


def _geometry(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...] | None, StridedView | None]:
    """Size of the view; the operand's dims as they lie in memory; the view as a cut of it. None where there is none."""
    operand, size = call.operands[0], call.arg("size")
    order, count = memory_order(operand), math.prod(operand.shape)
    if order is None or not count:
        return size, order, None
    return size, order, strided_view(count, size, call.arg("stride"), call.arg("storage_offset") or 0)


@rule_maker("aten.as_strided")
def _as_strided(call: OpCall) -> Rule | None:
    size, order, strided = _geometry(call)
    if order is None or strided is None:
        return None if order is None else _whole_layout_rule(call, order)
    plan = _StridedFactors(call.operands[0].shape, order, strided, size)

    def local(program: LocalCall) -> Any:
        emit, value = program.emit, plan.memory(program)
        extents = [*(size[dim] for dim in strided.dims), 1]
        for place, (start, extent, radix) in enumerate(zip(strided.starts, extents, strided.radices, strict=True)):
            if extent != radix:
                value = emit.slice(value, place, start, start + extent)
        ahead = sorted(range(len(strided.dims)), key=lambda place: strided.dims[place])
        value = emit.permute(value, [*ahead, len(ahead)])
        shape = program.result_shape()
        held = [extent if dim in strided.dims else 1 for dim, extent in enumerate(shape)]
        return emit.expand(emit.reshape(value, held), list(shape))

    return build(
        plan.sizes, [plan.source], [plan.result], whole=plan.whole, linear=[{0}], local=local, free=True, uneven=True
    )


@rule_maker("aten.as_strided_scatter")
def _as_strided_scatter(call: OpCall) -> Rule | None:
    """What is put into the view replaces everything where the view holds everything, each element once."""
    size, order, strided = _geometry(call)
    shape = call.operands[0].shape
    if order is None or strided is None or math.prod(size) != math.prod(shape) or strided.radices[-1] != 1:
        return None if order is None else _whole_layout_rule(call, order)
    plan = _StridedFactors(shape, order, strided, size)

    def local(program: LocalCall) -> Any:
        emit = program.emit
        ones = [dim for dim in range(len(size)) if dim not in strided.dims]
        value = emit.permute(program.operands[1], [*strided.dims, *ones])
        held = program.operand_shape(0)
        value = emit.reshape(value, [held[dim] for dim in order])
        return emit.permute(value, [order.index(dim) for dim in range(len(shape))])

    dims = [plan.source, plan.result]
    return build(plan.sizes, dims, [plan.source], whole=plan.whole, linear=[{0, 1}], local=local, uneven=True)


def _whole_layout_rule(call: OpCall, order: Sequence[int]) -> Rule:
    """Everything whole, and the operand laid out in memory as the whole tensor was when the call was captured."""

    def local(program: LocalCall) -> Any:
        emit, (value, *rest) = program.emit, program.operands
        value = emit.contiguous(emit.permute(value, list(order)))
        result = program.run(operands=[value, *rest])
        if not rest:
            return result
        return emit.permute(result, [order.index(dim) for dim in range(len(order))])

    names: dict[str, int] = {}

    def name_dims(place: str, meta: TensorMeta) -> list[list[str]]:
        own = {f"{place}_{dim}": size for dim, size in enumerate(meta.shape)}
        names.update(own)
        return [[name] for name in own]

    operands = [name_dims(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [name_dims("result", meta) for meta in call.results if meta is not None]
    linear = [set(range(len(operands)))]
    return build(names, operands, results, whole=names, linear=linear, local=local)
