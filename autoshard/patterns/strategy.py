"""Strategies: one choice per mesh axis for one operator, and the specs that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.patterns.rule import Dims, Factor, Rule
from autoshard.patterns.variants import (
    WHOLE,
    Choices,
    linear_choice,
    offered_factors,
    offered_linear,
    resolve_variant,
    variant_for,
)
from autoshard.size import ceil_div, divides, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import BlockShard, Routed, Spec, shard_placement

__all__ = [
    "WHOLE",
    "Choices",
    "axis_choices",
    "describe",
    "fits",
    "keeps_shares",
    "linear_choice",
    "local_shape",
    "local_size",
    "operand_spec",
    "operand_specs",
    "partial_kind",
    "result_spec",
    "result_specs",
    "splits",
    "splits_evenly",
    "uneven_axis",
    "work_split",
]

MOST_PADDING = 2
"""A strategy is offered where padding makes at most so many times as much work of it, all axes together."""


def axis_choices(rule: Rule, size: int) -> tuple[int, ...]:
    """All choices for one mesh axis of `size` devices, of every variant; `WHOLE` alone on an axis of one."""
    if size == 1:
        return (WHOLE,)
    factors = (
        index
        for index, factor in enumerate(offered_factors(rule))
        if factor.shardable and (divides(size, factor.size) or _pads(size, factor))
    )
    return (WHOLE, *factors, *(linear_choice(index) for index in range(len(offered_linear(rule)))))


def _pads(size: int, factor: Factor, steps: int | None = None) -> bool:
    """Whether `size` ranks may split a factor, or the `steps` of it that others left, in blocks that are padded."""
    steps = factor.size if steps is None else steps
    return factor.uneven and steps > 1 and ceil_div(steps, size) * size <= MOST_PADDING * steps


def fits(rule: Rule, choices: Choices, mesh: MeshShape) -> bool:
    """Whether the choices go together.

    A variant knows all of them, the axes of a factor divide it, all but the last, which may pad it unless it divides
    another part of the factor, no dim holds two factors that are padded, no result is partial in two ways at once, and
    rows are sent to groups over one axis alone.
    """
    found = variant_for(rule, choices)
    if found is None:
        return False
    rule, choices = found
    padded = set()
    for index, factor in enumerate(rule.factors):
        sizes = [
            size for choice, size in zip(choices, mesh.sizes, strict=True) if size > 1 and splits(rule, choice, index)
        ]
        if factor.routed == "group" and len(sizes) > 1:
            return False
        if not sizes or divides(math.prod(sizes), factor.size):
            continue
        others = math.prod(sizes[:-1])
        above = factor.size // others
        if not divides(others, factor.size) or not _pads(sizes[-1], factor, above):
            return False
        if factor.contiguous and len(sizes) > 1:
            return False
        if _divides_another_part(rule, choices, mesh, index, sizes[-1]):
            return False
        padded.add(index)
    if len(padded) > 1 and (
        _share_dim(rule, padded) or _total_split_count(choices, mesh) > MOST_PADDING * work_split(rule, choices, mesh)
    ):
        return False
    kinds: set[str] = set()
    for result in range(len(rule.results)):
        kinds = {kind for choice in choices if (kind := partial_kind(rule, choice, result)) is not None}
        if len(kinds) > 1:
            return False
    return True


def _divides_another_part(rule: Rule, choices: Choices, mesh: MeshShape, index: int, size: int) -> bool:
    """Whether an axis of `size` could split, without padding, another part of the factor that a part was cut from.

    A part of dynamic size is padded for want of knowledge, and may be split all the same.
    """
    factor = rule.factors[index]
    if factor.base == factor.name or is_dynamic(factor.size):
        return False
    return any(
        part.base == factor.base
        and part.shardable
        and place != index
        and divides(size * _split_count(choices, mesh, place), part.size)
        for place, part in enumerate(rule.factors)
    )


def _split_count(choices: Choices, mesh: MeshShape, factor: int) -> int:
    """Into how many parts the axes that chose a factor split it."""
    return math.prod(size for size, choice in zip(mesh.sizes, choices, strict=True) if choice == factor)


def _total_split_count(choices: Choices, mesh: MeshShape) -> int:
    """Into how many parts the axes that chose a factor split the work."""
    return math.prod(size for size, choice in zip(mesh.sizes, choices, strict=True) if choice >= 0)


def uneven_axis(rule: Rule, choices: Choices, mesh: MeshShape, factor: int) -> int | None:
    """The mesh axis that pads a factor: the last that chose it, where it does not divide what the others left."""
    axes = [axis for axis, choice in enumerate(choices) if choice == factor and mesh.sizes[axis] > 1]
    if not axes or divides(math.prod(mesh.sizes[axis] for axis in axes), rule.factors[factor].size):
        return None
    return axes[-1]


def splits(rule: Rule, choice: int, factor: int) -> bool:
    """Whether an axis with this choice splits a factor: the one that it chose, and with groups the sources of rows."""
    if choice == factor:
        return True
    return choice >= 0 and rule.factors[choice].routed == "group" and rule.factors[factor].routed == "source"


def _share_dim(rule: Rule, factors: set[int]) -> bool:
    """Whether some dim holds two of the factors."""
    tensors = (dims for dims in (*rule.operands, *rule.results) if dims is not None)
    return any(len(factors.intersection(dim)) > 1 for dims in tensors for dim in dims)


def local_size(rule: Rule, choices: Choices, mesh: MeshShape, factor: int, before: int | None = None) -> int:
    """Steps of a factor that one rank runs, padding included; only axes before the axis `before` count."""
    size = rule.factors[factor].size
    for axis, choice in enumerate(choices[:before]):
        if splits(rule, choice, factor):
            size = ceil_div(size, mesh.sizes[axis])
    return size


def partial_kind(rule: Rule, choice: int, result: int) -> str | None:
    """The reduction that a choice, of the factors of a rule without variants, leaves open on a result, if any."""
    if choice <= -2:
        return "sum"
    dims = rule.results[result]
    if choice == WHOLE or dims is None or _holds(rule, dims, choice):
        return None
    if rule.factors[choice].routed and len(rule.operands) + result in rule.routed:
        return None
    if not any(_holds(rule, operand, choice) for operand in rule.operands):
        return None
    return rule.factors[choice].reduction(result)


def _holds(rule: Rule, dims: Dims, choice: int) -> bool:
    return any(splits(rule, choice, factor) for dim in dims for factor in dim)


def operand_spec(rule: Rule, choices: Choices, mesh: MeshShape, operand: int) -> Spec:
    """The spec in which the strategy takes an operand."""
    return operand_specs(rule, (choices,), mesh, operand)[0]


def operand_specs(rule: Rule, strategies: Iterable[Choices], mesh: MeshShape, operand: int) -> list[Spec]:
    """`operand_spec` of many strategies."""

    def effect(own: Rule, choice: int) -> _AxisEffect:
        kind = "sum" if choice <= -2 and operand in own.linear[-2 - choice] else None
        return _axis_effect(own, own.operands[operand], choice, kind, operand in own.routed)

    return _specs(rule, strategies, mesh, lambda own: own.operands[operand], effect)


def result_spec(rule: Rule, choices: Choices, mesh: MeshShape, result: int) -> Spec:
    """The spec in which the strategy leaves a result; replicated for a result that is no tensor."""
    return result_specs(rule, (choices,), mesh, result)[0]


def result_specs(rule: Rule, strategies: Iterable[Choices], mesh: MeshShape, result: int) -> list[Spec]:
    """`result_spec` of many strategies."""

    def effect(own: Rule, choice: int) -> _AxisEffect:
        dims = own.results[result]
        if dims is None:
            return _NO_EFFECT
        return _axis_effect(
            own, dims, choice, partial_kind(own, choice, result), len(own.operands) + result in own.routed
        )

    return _specs(rule, strategies, mesh, lambda own: own.results[result] or (), effect)


class _AxisEffect(NamedTuple):
    """What a choice does with one tensor on its axis.

    Attributes:
        split: the loops that it splits, as pairs of a dim and a place among the factors of the dim.
        partial: the reduction that it leaves open, if any.
        routed: for rows that lie as the data says, the dim and the kind of `Routed`.
    """

    split: tuple[tuple[int, int], ...] = ()
    partial: str | None = None
    routed: tuple[int | None, str] | None = None


_NO_EFFECT = _AxisEffect()


def _axis_effect(rule: Rule, dims: Dims, choice: int, partial: str | None, routed: bool) -> _AxisEffect:
    if choice < 0:
        return _AxisEffect(partial=partial)
    split = tuple(
        (dim, place)
        for dim, factors in enumerate(dims)
        for place, factor in enumerate(factors)
        if splits(rule, choice, factor)
    )
    by_data = rule.factors[choice].routed if routed else ""
    return _AxisEffect(split, partial, (next((dim for dim, _ in split), None), by_data) if by_data else None)


_Sizes = tuple[tuple[int, ...], ...]
"""Of a tensor whose dims are products of factors, the sizes of these, per dim."""


def _specs(
    rule: Rule,
    strategies: Iterable[Choices],
    mesh: MeshShape,
    dims_of: Callable[[Rule], Dims],
    way: Callable[[Rule, int], _AxisEffect],
) -> list[Spec]:
    """A spec per strategy, from what each of its choices does. Few differ, among all operators: each is made once.

    A dynamic size equals a number, which is not all that it is: nothing is remembered of it.
    """
    numbers: dict[_AxisEffect, int] = {}  # of what a choice does
    implementations: dict[int, _SpecCache] = {}
    specs = []
    for choices in strategies:
        own, chosen = resolve_variant(rule, choices) if rule.variants else (rule, choices)
        one = implementations.get(id(own))
        if one is None:
            sizes = tuple(tuple(own.factors[factor].size for factor in dim) for dim in dims_of(own))
            dynamic = any(is_dynamic(size) for dim in sizes for size in dim)
            one = implementations[id(own)] = _SpecCache(sizes, _spec if dynamic else _cached_spec)
        for choice in chosen:
            if choice not in one.effect_numbers:
                one.effect_numbers[choice] = numbers.setdefault(way(own, choice), len(numbers))
        key = tuple(map(one.effect_numbers.__getitem__, chosen))
        spec = one.specs.get(key)
        if spec is None:
            ways = list(numbers)
            spec = one.specs[key] = one.make(one.sizes, tuple(ways[number] for number in key), mesh)
        specs.append(spec)
    return specs


@dataclass(frozen=True, slots=True)
class _SpecCache:
    """Of one implementation, what is worked out of one tensor.

    Attributes:
        sizes: of its factors.
        make: makes a spec.
        known: what every choice does, by its number.
        made: the specs, by what their choices do.
    """

    sizes: _Sizes
    make: Callable[..., Spec]
    effect_numbers: dict[int, int] = field(default_factory=dict)
    specs: dict[tuple[int, ...], Spec] = field(default_factory=dict)


def _spec(sizes: _Sizes, ways: tuple[_AxisEffect, ...], mesh: MeshShape) -> Spec:
    """Placements of a tensor whose dims are products of factors.

    Within a factor, axes split in mesh order, the first axis outermost. An axis' split factor is the product of what
    stands left of it in its dim when the axes before it have split the tensor, which is how torch reads placements.
    Where the axis does not divide its factor, blocks are made of whole steps of the factor. A tensor that is routed
    lies as the data says on the axes that split the sources or the groups.
    """
    placements: list[Placement] = [Partial(way.partial) if way.partial else Replicate() for way in ways]
    steps = [list(dim) for dim in sizes]  # what the axes so far have left of every factor
    for axis, (way, size) in enumerate(zip(ways, mesh.sizes, strict=True)):
        if way.routed is not None and size > 1:
            placements[axis] = Routed(*way.routed)
        for dim, place in way.split if way.routed is None else ():
            outer = math.prod(steps[dim][:place])
            placements[axis] = shard_placement(dim, outer)
            if steps[dim][place] % size:
                block = ceil_div(steps[dim][place], size) * math.prod(steps[dim][place + 1 :])
                placements[axis] = BlockShard(dim, block, outer)
        for dim, place in way.split:
            steps[dim][place] = ceil_div(steps[dim][place], size)
    spec = Spec.of(*placements)
    return canonical([math.prod(dim) for dim in sizes], spec, mesh) if spec.has_blocks else spec


_cached_spec = lru_cache(maxsize=1 << 16)(_spec)


def local_shape(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's shard, padding included, of a tensor of shape `whole`, under a rule without variants."""
    return tuple(
        math.prod(local_size(rule, choices, mesh, factor) for factor in dim) if dim else size
        for size, dim in zip(whole, dims, strict=True)
    )


def work_split(rule: Rule, choices: Choices, mesh: MeshShape) -> float:
    """Into how many parts of the size of a rank's the strategy splits the operator's work; padding is work."""
    split = dict.fromkeys(_work_factor(rule, choice) for choice in choices if choice >= 0)
    return math.prod(
        int(rule.factors[factor].size) / max(int(local_size(rule, choices, mesh, factor)), 1) for factor in split
    )


def _work_factor(rule: Rule, choice: int) -> int:
    """The factor whose split shares the work: of routed rows the rows, whichever way they are split."""
    if rule.factors[choice].routed:
        return next((index for index, factor in enumerate(rule.factors) if factor.routed == "source"), choice)
    return choice


def describe(rule: Rule, choices: Choices, mesh: MeshShape) -> str:
    """The strategy in words, such as `i on dp, k on tp`; `whole` when nothing is split."""
    return ", ".join(_parts(rule, choices, mesh)) or "whole"


def _parts(rule: Rule, choices: Choices, mesh: MeshShape) -> Iterator[str]:
    factors = offered_factors(rule)
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if choice >= 0:
            yield f"{factors[choice].name} on {axis.name}"
        elif choice <= -2:
            yield f"partial sum passes on {axis.name}"


def keeps_shares(rule: Rule, choice: int, shared: SharedAxis) -> bool:
    """Whether a choice for the shared axis leaves shares as they are.

    What has to do with the batch is split along it, or whole: nothing else comes in such shares, and no sum of what
    lies so is scattered in them. A rule that knows no batch may be split by anything.
    """
    factors = offered_factors(rule)
    if choice == WHOLE or not any(shared.is_of_whole(factor.size) for factor in factors):
        return True
    return choice >= 0 and shared.is_whole(factors[choice].size)


def splits_evenly(rule: Rule, choices: Choices, shared: SharedAxis, mesh: MeshShape) -> bool:
    """Whether axes other than the shared one split what depends on the shared size in multiples of it.

    Else a block is no whole number of what is shared, and may be as long as a share that it is not.
    """
    factors, others = offered_factors(rule), [axis for axis in range(mesh.ndim) if axis != shared.axis]
    return all(
        shared.is_multiple(factors[one].size, math.prod(mesh.sizes[axis] for axis in others if choices[axis] == one))
        for one in {choices[axis] for axis in others if choices[axis] >= 0}
    )
