"""View arithmetic: two shapes of one tensor as products of common factors.

A reshape keeps the row-major order of elements, so both shapes cut one index into digits. The factors are the
digits of the finest common numbering; sharding one of them shards both sides, with no communication, and where it
is not the major factor of its dim the placement is a strided shard (Rhino 4.1: reshape passes strides on).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.rule import Dims, OpCall, Rule
from autoshard.size import common_divisor


@dataclass(frozen=True, slots=True)
class ViewFactors:
    """Two shapes as products of factors.

    Attributes:
        sizes: size of every factor; none is one.
        source: for every dim of the source, its factors, major to minor.
        target: the same for the target.
        shardable: False for a factor that only one of the shapes has, because the two do not align there.
    """

    sizes: tuple[int, ...]
    source: Dims
    target: Dims
    shardable: tuple[bool, ...]


@cache
def factor_view(source: tuple[int, ...], target: tuple[int, ...]) -> ViewFactors:
    """The common factors of two shapes of one tensor: `[B, T, 3·H·D]` and `[B, T, 3, H, D]` have B, T, 3, H, D.

    Dims of size one have no factors. Where the shapes do not align, as in `[3, 2]` and `[2, 3]`, each gets factors of
    its own, which are not shardable. A tensor without elements aligns as far as its leading dims are equal.
    """
    assert math.prod(source) == math.prod(target), (source, target)
    cutter = _Cutter(source, target)
    if math.prod(source) == 0:
        cutter.cut_equal()
    else:
        cutter.cut_left()
    return cutter.view()


class _Cutter:
    """Takes common factors off the left and the right of what is left of two shapes."""

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
        """Leading dims that are equal, of a tensor without elements."""
        for dim, (a, b) in enumerate(zip(*self.rest, strict=False)):
            if a != b:
                return
            if a != 1:
                factor = self._factor(a)
                for side in (0, 1):
                    self.left[side][dim].append(factor)
                    self.rest[side][dim] = 1

    def cut_left(self) -> None:
        """Common factors from the left; at a place that does not align, what stands behind it is tried again."""
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
        """Past the smallest groups of dims from i and j that hold equally many elements, cut from the right."""
        source, target = self.rest
        ends = [i + 1, j + 1]
        products = [source[i], target[j]]
        while products[0] != products[1]:
            side = 0 if products[0] < products[1] else 1
            products[side] *= self.rest[side][ends[side]]
            ends[side] += 1
        a, b = ends[0] - 1, ends[1] - 1
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
        """The factors, once all common ones are cut; what is left of a dim becomes a factor that can't be sharded."""
        dims: list[Dims] = []
        for side in (0, 1):
            for dim, rest in enumerate(self.rest[side]):
                if rest != 1:
                    self.left[side][dim].append(self._factor(rest, shardable=False))
            sides = zip(self.left[side], self.right[side], strict=True)
            dims.append(tuple(tuple(left + right) for left, right in sides))
        return ViewFactors(tuple(self.sizes), dims[0], dims[1], tuple(self.shardable))


def _next(shape: list[int], dim: int) -> int:
    """The first dim from `dim` on that is not used up."""
    while dim < len(shape) and shape[dim] == 1:
        dim += 1
    return dim


def view_rule(call: OpCall) -> Rule:
    """The rule of an operator that gives its only operand another shape, elements in the same order."""
    view = factor_view(call.operands[0].shape, call.result.shape)
    names = [f"d{index}" for index in range(len(view.sizes))]
    return build(
        dict(zip(names, view.sizes, strict=True)),
        operands=[[[names[factor] for factor in dim] for dim in view.source]],
        results=[[[names[factor] for factor in dim] for dim in view.target]],
        whole=[name for name, shardable in zip(names, view.shardable, strict=True) if not shardable],
        linear=[{0}],
        local=_reshape,
        free=True,
        uneven=True,
    )


def _reshape(call: LocalCall) -> object:
    # A reshape, whatever the operator: the local value need not lie in memory as the whole one does.
    return call.operands[0].reshape(call.result_shape())
