"""Views: operators that change the shape or order of a tensor's elements, or nothing.

A reshape keeps the row-major order of elements, so both shapes write one linear index in mixed-radix digits. The
factors are the digits of the finest common radices. Sharding one of them shards both sides without communication; where
it is not the major factor of its dim, the placement is a strided shard (Rhino 4.1: reshape passes strides on).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import aten, factor_names, numbered_dims, positions, run_resized, same_dims_rule
from autoshard.patterns.registry import rule, rule_for, rule_maker
from autoshard.patterns.rule import Dims, Factor, OpCall, Rule, TensorMeta, build, is_inexact
from autoshard.size import common_divisor
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True)
class ViewFactors:
    """Two shapes as products of factors.

    Attributes:
        sizes: size of every factor; none is one.
        source: for every dim of the source, its factors, major to minor.
        target: the same for the target.
        shardable: False for a factor of only one of the shapes, where the two do not align.
    """

    sizes: tuple[int, ...]
    source: Dims
    target: Dims
    shardable: tuple[bool, ...]


@cache
def factor_view(source: tuple[int, ...], target: tuple[int, ...]) -> ViewFactors:
    """The common factors of two shapes of one tensor: `[B, T, 3·H·D]` and `[B, T, 3, H, D]` have B, T, 3, H, D.

    Dims of size 1 have no factors. Where the shapes do not align, as in `[3, 2]` and `[2, 3]`, each gets separate
    factors, which are not shardable. An empty tensor aligns as far as its leading dims are equal.
    """
    assert math.prod(source) == math.prod(target), (source, target)
    cutter = _Cutter(source, target)
    if math.prod(source) == 0:
        cutter.cut_equal()
    else:
        cutter.cut_left()
    return cutter.view()


class _Cutter:
    """Divides common factors out of two shapes, from the left and the right."""

    def __init__(self, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        self.rest = (list(source), list(target))
        self.left: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])
        self.right: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])
        self.sizes: list[int] = []
        self.shardable: list[bool] = []

    def _factor(self, size: int, shardable: bool = True) -> int:
        self.sizes.append(size)
        self.shardable.append(shardable)
        return len(self.sizes) - 1

    def cut_equal(self) -> None:
        """Cut equal leading dims of an empty tensor."""
        for dim, (a, b) in enumerate(zip(*self.rest, strict=False)):
            if a != b:
                return
            if a != 1:
                factor = self._factor(a)
                for side in (0, 1):
                    self.left[side][dim].append(factor)
                    self.rest[side][dim] = 1

    def cut_left(self) -> None:
        """Cut common factors from the left; skip dims that do not align."""
        i = j = 0
        source, target = self.rest
        while True:
            i, j = _next(source, i), _next(target, j)
            if i == len(source) or j == len(target):
                return
            common = common_divisor(source[i], target[j])
            if common == 1:
                i, j = self._skip(i, j)
                continue
            factor = self._factor(common)
            self.left[0][i].append(factor)
            self.left[1][j].append(factor)
            source[i] //= common
            target[j] //= common

    def _skip(self, i: int, j: int) -> tuple[int, int]:
        """Skip the smallest groups of dims from i and j with equal products, and cut them from the right."""
        source, target = self.rest
        ends = [i + 1, j + 1]
        products = [source[i], target[j]]
        # Products of all remaining dims are equal, so the two meet at the ends of the shapes at the latest.
        while products[0] != products[1]:
            side = 0 if products[0] < products[1] else 1
            products[side] *= self.rest[side][ends[side]]
            ends[side] += 1
        a, b = ends[0] - 1, ends[1] - 1
        # Minor parts that do align are factors of both: sharded, they are strided shards on both sides.
        while (common := common_divisor(source[a], target[b])) > 1:
            factor = self._factor(common)
            self.right[0][a].insert(0, factor)
            self.right[1][b].insert(0, factor)
            source[a] //= common
            target[b] //= common
            while a > i and source[a] == 1:
                a -= 1
            while b > j and target[b] == 1:
                b -= 1
        for side, start in ((0, i), (1, j)):
            for dim in range(start, ends[side]):
                if self.rest[side][dim] != 1:
                    self.left[side][dim].append(self._factor(self.rest[side][dim], shardable=False))
                    self.rest[side][dim] = 1
        return ends[0], ends[1]

    def view(self) -> ViewFactors:
        """The factors after all cuts; the remainder of a dim becomes a factor that can't be sharded."""
        dims: list[Dims] = []
        for side in (0, 1):
            for dim, rest in enumerate(self.rest[side]):
                if rest != 1:
                    self.left[side][dim].append(self._factor(rest, shardable=False))
            sides = zip(self.left[side], self.right[side], strict=True)
            dims.append(tuple(tuple(left + right) for left, right in sides))
        return ViewFactors(tuple(self.sizes), dims[0], dims[1], tuple(self.shardable))


def _next(shape: list[int], dim: int) -> int:
    """The first dim from `dim` on with a remainder other than 1."""
    while dim < len(shape) and shape[dim] == 1:
        dim += 1
    return dim


def view_rule(call: OpCall) -> Rule:
    """The rule of an operator that reshapes its only operand."""
    view = factor_view(call.operands[0].shape, call.result.shape)
    names = [f"d{index}" for index in range(len(view.sizes))]
    return build(
        dict(zip(names, view.sizes, strict=True)),
        operands=[[[names[factor] for factor in dim] for dim in view.source]],
        results=[[[names[factor] for factor in dim] for dim in view.target]],
        whole=[name for name, shardable in zip(names, view.shardable, strict=True) if not shardable],
        linear=[{0}],
        # One function for all views: equal rules are shared only if their programs are one object.
        local=_reshape,
        free=True,
        uneven=True,
    )


def _reshape(call: LocalCall) -> Any:
    # `reshape` for every operator: the local value may have other strides than the whole one.
    return call.operands[0].reshape(call.result_shape())


rule_maker(
    *("aten.view.default", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.flatten.using_ints"),
    *("aten.unflatten.int", "aten.squeeze", "aten.unsqueeze"),
)(view_rule)

rule(["aten.alias", "aten.detach", "aten.lift_fresh"], "... -> ...", linear="0", free=True)
rule(["aten.clone", "aten.contiguous", "aten.lift", "aten.lift_fresh_copy"], "... -> ...", linear="0")
rule("autoshard.to_host", "... -> ...", linear="0")
rule("autoshard.to_device", "... -> ...", linear="0", local=lambda call: call.run(device=call.emit.home), uneven=True)


@rule_maker("aten.view.dtype")
def _view_dtype(call: OpCall) -> Rule:
    """A view as another dtype: the last dim is whole if the element size changes."""
    shape = call.operands[0].shape
    if shape == call.result.shape:
        return same_dims_rule(call, free=True)
    sizes = numbered_dims(shape)
    *outer, last = sizes
    sizes["bytes"] = call.result.shape[-1]
    return build(sizes, [[*outer, last]], [[*outer, "bytes"]], whole=[last, "bytes"], free=True)


@rule_maker("aten._to_copy", "aten.to.dtype")
def _to_copy(call: OpCall) -> Rule:
    """A cast, linear between floating and complex dtypes."""
    # A cast to integers would round each term of a sum.
    inexact = is_inexact(call.operands[0].dtype) and is_inexact(call.result.dtype)
    return same_dims_rule(call, linear=[{0}] if inexact else [])


def _permutation_rule(call: OpCall, order: Sequence[int], **options: Any) -> Rule:
    """The rule of a permutation; `order` lists the operand's dim of each of the result's dims."""
    sizes = numbered_dims(call.operands[0].shape)
    names = list(sizes)
    return build(sizes, [names], [[names[dim] for dim in order]], linear=[{0}], **options)


@rule_maker("aten.permute")
def _permute(call: OpCall) -> Rule:
    return _permutation_rule(call, call.arg("dims"), free=True)


@rule_maker("aten.transpose.int", "aten.t")
def _transpose(call: OpCall) -> Rule:
    order = list(range(len(call.operands[0].shape)))
    first, second = (0, -1) if call.name == "aten::t" else (call.arg("dim0"), call.arg("dim1"))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permutation_rule(call, order, free=True)


@rule_maker("aten.rot90")
def _rot90(call: OpCall) -> Rule:
    """Quarter turns in the plane of two dims, which must be whole; an odd number swaps them in the result."""
    order = list(range(len(call.operands[0].shape)))
    first, second = (dim % len(order) for dim in call.arg("dims"))
    if call.arg("k") % 2:
        order[first], order[second] = second, first
    return _permutation_rule(call, order, whole=[f"d{first}", f"d{second}"])


def _expansion_rule(call: OpCall, grown_by: str, keeps: bool) -> Rule:
    """A result with dims (new, old), aligned to the right, where `new` is a factor of the result only."""
    (operand,), shape = call.operands, call.result.shape
    offset = len(shape) - len(operand.shape)
    sizes: dict[str, int] = {}
    target = []
    for dim, size in enumerate(shape):
        old = operand.shape[dim - offset] if dim >= offset else 1
        sizes[f"new{dim}"] = size // old if old else 1
        if dim >= offset:
            sizes[f"d{dim - offset}"] = old
        target.append([f"new{dim}", f"d{dim - offset}"] if dim >= offset else [f"new{dim}"])

    def repeat(program: LocalCall) -> Any:
        return program.run(**{grown_by: [program.size(f"new{dim}") for dim in range(len(shape))]})

    source = factor_names("d", len(operand.shape))
    local = run_resized(grown_by) if keeps else repeat
    return build(sizes, [source], [target], linear=[{0}], local=local, free=keeps, uneven=True)


@rule_maker("aten.expand")
def _expand(call: OpCall) -> Rule:
    """Dims of size 1 repeated: the repetition is a factor of the result only (as in grouped-query attention)."""
    return _expansion_rule(call, "size", keeps=True)


@rule_maker("aten.repeat")
def _repeat(call: OpCall) -> Rule | None:
    # For empty tensors, the quotient of sizes does not tell the number of repetitions.
    empty = 0 in call.operands[0].shape or 0 in call.result.shape
    return None if empty else _expansion_rule(call, "repeats", keeps=False)


@rule_maker("aten.roll", "aten.flip")
def _roll_flip(call: OpCall) -> Rule:
    return same_dims_rule(call, call.arg("dims") or range(len(call.operands[0].shape)), linear=[{0}])


@rule_maker("aten.view_as_real", "aten.view_as_complex")
def _complex(call: OpCall) -> Rule:
    """Real and imaginary part are a last dim of size 2, which is whole."""
    sizes = numbered_dims(min(call.operands[0].shape, call.result.shape, key=len))
    tensors = [list(sizes), [*sizes, "part"]]
    if call.op == aten.view_as_complex.default:
        tensors.reverse()
    return build(sizes | {"part": 2}, tensors[:1], tensors[1:], whole=["part"], linear=[{0}], free=True)


# Copying views, which functionalisation makes of views where nothing may share memory.

_VIEWS = """
    alias as_strided detach diagonal expand narrow permute select.int slice.Tensor split.Tensor split_with_sizes squeeze
    squeeze.dim squeeze.dims t transpose.int unbind.int unfold unsqueeze view view.dtype view_as_complex view_as_real
"""


def _copy_rule_maker(view: Any) -> Callable[[OpCall], Rule | None]:
    """The rule of a view with a local program that copies."""

    def maker(call: OpCall) -> Rule | None:
        rule = rule_for(replace(call, op=view))
        return None if rule is None else add_copies(rule)

    def add_copies(rule: Rule) -> Rule:
        def local(program: LocalCall) -> Any:
            # Run the view's program on a call of the view, with the same arguments.
            viewing = copy.copy(program)
            viewing.call = replace(program.call, op=view)
            results = viewing.run() if rule.local is None else rule.local(viewing)
            several = isinstance(results, (tuple, list))
            copies = [value.clone() for value in (results if several else [results])]
            return tuple(copies) if several else copies[0]

        return replace(rule, local=local, free=False, variants=tuple(map(add_copies, rule.variants)))

    return maker


for _view in _VIEWS.split():
    _name, _, _overload = _view.partition(".")
    rule_maker(f"aten.{_name}_copy.{_overload or 'default'}")(
        _copy_rule_maker(getattr(getattr(aten, _name), _overload or "default"))
    )


# `as_strided` and `as_strided_scatter`, which depend on the memory layout of the whole tensor.
#
# Most uses equal a plain view: memory split into dims of decreasing stride, which are sliced, permuted or repeated. The
# rule of such a call is that of the view, whose factors may be sharded. Any other call runs whole, on memory with the
# layout that the call expects.


def memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """The dims of a tensor in memory order (decreasing stride); None if its memory has gaps or overlaps."""
    if meta.strides is None:
        return None
    strides = meta.strides
    # Dims of size 1 may have any stride: put them first, where they do not affect the product of sizes.
    order = sorted(range(len(meta.shape)), key=lambda dim: (meta.shape[dim] != 1, -strides[dim]))
    expected = 1
    for dim in reversed(order):
        if meta.shape[dim] != 1 and strides[dim] != expected:
            return None
        expected *= meta.shape[dim]
    return tuple(order)


@dataclass(frozen=True, slots=True)
class StridedView:
    """An `as_strided` as a reshape of memory and a slice.

    Attributes:
        radices: the shape into which memory is split; the last dim is the stride of the innermost dim.
        starts: the start of the slice of each of these dims.
        dims: the result's dims that correspond to all radices but the last; other dims have size 1 or are repeated.
    """

    radices: tuple[int, ...]
    starts: tuple[int, ...]
    dims: tuple[int, ...]


def strided_view(count: int, size: Sequence[int], stride: Sequence[int], offset: int) -> StridedView | None:
    """Return `as_strided(size, stride, offset)` of `count` contiguous elements as a view; None if it is none."""
    dims = sorted((dim for dim in range(len(size)) if size[dim] > 1 and stride[dim] > 0), key=lambda dim: -stride[dim])
    radices, starts, left, rest = [], [], count, offset
    for dim in dims:
        if left % stride[dim]:  # the remaining size is not a multiple of the stride
            return None
        radices.append(left // stride[dim])
        starts.append(rest // stride[dim])
        left, rest = stride[dim], rest % stride[dim]
        if starts[-1] + size[dim] > radices[-1]:  # the dim overlaps the next step of the enclosing dim
            return None
    return StridedView((*radices, left), (*starts, rest), tuple(dims))


class _StridedFactors:
    """The factors of a strided view.

    Attributes:
        order: the operand's dims in memory order.
        strided: the view.
        sizes: size of every factor.
        whole: factors that can't be sharded.
        source: factors of the operand's dims.
        radices: factors of the radices of memory.
        result: factors of the view's dims.
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
            if size[dim] != radix:  # sliced
                self.result[dim] = [f"part{dim}"]
                self.sizes[f"part{dim}"] = size[dim]
                self.whole += [f"part{dim}", *names]

    def memory(self, call: LocalCall) -> Any:
        """The local operand in memory order, reshaped to radices of local size."""
        value = call.operands[0].permute(list(self.order))
        shape = [math.prod(call.size(name) for name in names) for names in self.radices]
        return value.reshape(shape)


def _geometry(call: OpCall) -> tuple[tuple[int, ...], tuple[int, ...] | None, StridedView | None]:
    """The size of the view; the operand's dims in memory order, or None; the call as a view, or None."""
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
        value = plan.memory(program)
        extents = [*(size[dim] for dim in strided.dims), 1]
        for place, (start, extent, radix) in enumerate(zip(strided.starts, extents, strided.radices, strict=True)):
            if extent != radix:
                value = value.slice(place, start, start + extent)
        ahead = sorted(range(len(strided.dims)), key=lambda place: strided.dims[place])
        value = value.permute([*ahead, len(ahead)])
        shape = program.result_shape()
        held = [extent if dim in strided.dims else 1 for dim, extent in enumerate(shape)]
        return value.reshape(held).expand(list(shape))

    return build(
        plan.sizes, [plan.source], [plan.result], whole=plan.whole, linear=[{0}], local=local, free=True, uneven=True
    )


@rule_maker("aten.as_strided_scatter")
def _as_strided_scatter(call: OpCall) -> Rule | None:
    """If the view has every element once, all of the operand is replaced."""
    size, order, strided = _geometry(call)
    shape = call.operands[0].shape
    if order is None or strided is None or math.prod(size) != math.prod(shape) or strided.radices[-1] != 1:
        return None if order is None else _whole_layout_rule(call, order)
    plan = _StridedFactors(shape, order, strided, size)

    def local(program: LocalCall) -> Any:
        ones, held = [dim for dim in range(len(size)) if dim not in strided.dims], program.operand_shape(0)
        value = program.operands[1].permute([*strided.dims, *ones]).reshape([held[dim] for dim in order])
        return value.permute([order.index(dim) for dim in range(len(shape))])

    dims = [plan.source, plan.result]
    return build(plan.sizes, dims, [plan.source], whole=plan.whole, linear=[{0, 1}], local=local, uneven=True)


def _whole_layout_rule(call: OpCall, order: Sequence[int]) -> Rule:
    """Everything is whole; the operand gets the memory layout that it had at capture."""

    def local(program: LocalCall) -> Any:
        value, *rest = program.operands
        result = program.run(operands=[value.permute(list(order)).contiguous(), *rest])
        return result.permute([order.index(dim) for dim in range(len(order))]) if rest else result

    operands = [numbered_dims(meta.shape, f"operand{place}_") for place, meta in enumerate(call.operands)]
    result = numbered_dims(call.result.shape, "result_")
    sizes = {name: size for dims in (*operands, result) for name, size in dims.items()}
    linear = [set(range(len(operands)))]
    return build(sizes, [list(dims) for dims in operands], [list(result)], whole=sizes, linear=linear, local=local)


# Views that split a dim into parts that an axis does not divide, though it divides the dim.
#
# Eight query heads can be sharded over eight devices; as two key heads of four queries they cannot. The backward of a
# repetition of key heads (`[b, 8, s, d]` viewed as `[b, 2, 4, s, d]`, summed over the 4) would have to gather them.
# The variant shards the dim as one factor, and the view is a partial sum: a rank's own stretch among zeros.


def with_merged_dims(rule: Rule, call: OpCall, mesh: MeshShape) -> Rule:
    """The rule of a view with a variant for every dim of its operand that can only be sharded as one factor.

    Args:
        rule: the rule of a view: one operand, one result, the elements in the same order.
        call: the view on whole tensors.
        mesh: the axes, whose sizes tell which dims these are.

    Returns:
        The same rule where there are none, or where the dtype is neither floating nor complex.
    """
    (operand,) = call.operands
    # The result is a partial sum.
    if not is_inexact(operand.dtype):
        return rule
    blocked = [dim for dim in range(len(operand.shape)) if _needs_merge(rule, dim, mesh)]
    return replace(rule, variants=tuple(_merged_variant(rule, dim) for dim in blocked)) if blocked else rule


def _needs_merge(rule: Rule, dim: int, mesh: MeshShape) -> bool:
    """Return True if the largest axis that divides the dim divides none of its factors."""
    sizes = [rule.factors[factor].size for factor in rule.operands[0][dim]]
    axes = [size for size in mesh.sizes if size > 1 and math.prod(sizes) % size == 0]
    return len(sizes) > 1 and bool(axes) and all(size % max(axes) for size in sizes)


def _merged_variant(rule: Rule, dim: int) -> Rule:
    """The variant that shards one dim of the operand as a single factor, which the result lacks."""
    parts = rule.operands[0][dim]
    factors = tuple(replace(each, shardable=False) if at in parts else each for at, each in enumerate(rule.factors))
    whole = Factor(f"whole{dim}", math.prod(rule.factors[part].size for part in parts), contiguous=True)
    dims: Dims = tuple((len(factors),) if at == dim else named for at, named in enumerate(rule.operands[0]))
    return replace(
        rule,
        factors=(*factors, whole),
        operands=(dims,),
        local=lambda call: _scatter_into_zeros(call, dim),
        free=False,
    )


def _scatter_into_zeros(call: LocalCall, dim: int) -> Any:
    (value,), name = call.operands, f"whole{dim}"
    shape = list(value.shape)
    held = positions(call, name, shape[dim], value.device)
    shape[dim] *= call.share(name)
    # By indices, not by padding: the number of zeros before the stretch differs from rank to rank.
    whole = value.new_zeros(shape).index_copy(dim, held, value)
    return whole.reshape(list(call.result_shape()))
