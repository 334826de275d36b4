"""Strategies: one choice per mesh axis for one operator, those that fit, and the specs that follow from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.patterns.rule import Dims, Factor, Rule
from autoshard.size import ceil_div, divides, is_dynamic
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import canonical
from autoshard.specs.spec import BlockShard, Routed, Spec, shard_placement

# Rules with several implementations: the offered factors, and the variant that belongs to choices.
#
# Choices are indices into the factors of the rule, followed by factors with new names in its variants. Factors of one
# name in two variants are the same loop, so one axis may keep its choice while another changes the implementation.
#
# Source: Whale 3.2.2: a pattern has several implementations, and the cheapest wins.

Choices = tuple[int, ...]
"""One choice per mesh axis: a factor's index; `WHOLE`; or `linear_choice(k)` for the k-th linear set of the rule."""

WHOLE = -1

ABSENT = -(2**31)
"""The choice, on every axis, of an operator that does not run, in problems where it may be left out."""


def linear_choice(index: int) -> int:
    """Return the choice that passes partial sums through the rule's linear set `index`."""
    return -2 - index


def offered_factors(rule: Rule) -> tuple[Factor, ...]:
    """Return the factors that choices index: those of the rule, then those that each variant adds."""
    if not rule.variants:
        return rule.factors
    offered: dict[str, Factor] = {}
    # The rule's own factors first, so that choices of them are their indices in the rule.
    for each in (rule, *rule.variants):
        for factor in each.factors:
            offered.setdefault(factor.name, factor)
    return tuple(offered.values())


def offered_linear(rule: Rule) -> tuple[frozenset[int], ...]:
    """Return the linear sets that choices index: those of the rule, then those that each variant adds."""
    if not rule.variants:
        return rule.linear
    return tuple(dict.fromkeys(operands for each in (rule, *rule.variants) for operands in each.linear))


def variant_for(rule: Rule, choices: Choices) -> tuple[Rule, Choices] | None:
    """Return the first implementation with all chosen factors, and the choices in its factors; None without one."""
    if not rule.variants:
        return rule, choices
    factors, linear = offered_factors(rule), offered_linear(rule)
    # The rule itself first: variants are for choices that the rule does not have.
    for variant in (rule, *rule.variants):
        translated = tuple(_choice_in_variant(variant, choice, factors, linear) for choice in choices)
        if None not in translated:
            return variant, tuple(choice for choice in translated if choice is not None)
    return None


def _choice_in_variant(
    variant: Rule, choice: int, factors: tuple[Factor, ...], linear: tuple[frozenset[int], ...]
) -> int | None:
    """Return an offered choice as an index of the variant; None if the variant does not have it."""
    if choice == WHOLE:
        return WHOLE
    if choice < WHOLE:
        operands = linear[-2 - choice]
        return linear_choice(variant.linear.index(operands)) if operands in variant.linear else None
    name = factors[choice].name
    return next(
        (index for index, factor in enumerate(variant.factors) if factor.name == name and factor.shardable), None
    )


def resolve_variant(rule: Rule, choices: Choices) -> tuple[Rule, Choices]:
    """Return the implementation that has the choices, and the choices as indices of its factors.

    The choices must satisfy `fits`.
    """
    resolved = variant_for(rule, choices)
    assert resolved is not None, f"no variant knows all of {choices}"
    return resolved


# Choices for one mesh axis, and compatible combinations of them.

# Beyond it, half of the devices idle, and some other strategy is better.
MOST_PADDING = 2
"""The largest ratio of padded work to true work, over all axes, of a strategy that is offered."""


def axis_choices(rule: Rule, size: int) -> tuple[int, ...]:
    """Return all choices, of every variant, for a mesh axis of `size` devices; only `WHOLE` for size 1."""
    if size == 1:
        return (WHOLE,)
    factors = (
        index
        for index, factor in enumerate(offered_factors(rule))
        if factor.shardable and (divides(size, factor.size) or _pads(size, factor))
    )
    return (WHOLE, *factors, *(linear_choice(index) for index in range(len(offered_linear(rule)))))


def _pads(size: int, factor: Factor, steps: int | None = None) -> bool:
    """Return True if `size` ranks may split a factor, or `steps` of it, into padded blocks."""
    steps = factor.size if steps is None else steps
    return factor.uneven and steps > 1 and ceil_div(steps, size) * size <= MOST_PADDING * steps


def fits(rule: Rule, choices: Choices, mesh: MeshShape) -> bool:
    """Return True if the choices of all axes are compatible.

    * Some variant has all of them.
    * The axes of a factor divide it; only the last may pad it, unless it divides another part of the factor.
    * No dim has two padded factors.
    * No result is partial in two ways at once.
    * Rows are sent to groups over one axis only.
    """
    resolved = variant_for(rule, choices)
    if resolved is None:
        return False
    rule, choices = resolved
    padded = set()
    for index, factor in enumerate(rule.factors):
        sizes = [
            size for choice, size in zip(choices, mesh.sizes, strict=True) if size > 1 and splits(rule, choice, index)
        ]
        if factor.routed == "group" and len(sizes) > 1:
            return False
        if not sizes or divides(math.prod(sizes), factor.size):
            continue
        # Axes split a factor in mesh order, outermost first: after an axis that pads, steps are unequal.
        others = math.prod(sizes[:-1])
        above = factor.size // others
        if not divides(others, factor.size) or not _pads(sizes[-1], factor, above):
            return False
        if factor.contiguous and len(sizes) > 1:  # padding would be inside the stretches of the outer axis
            return False
        # Padding one part is useless where the axis splits another evenly.
        if _divides_another_part(rule, choices, mesh, index, sizes[-1]):
            return False
        padded.add(index)
    if len(padded) > 1:
        # `_pads` checks each axis alone; together they may still pad too much.
        parts = math.prod(size for size, choice in zip(mesh.sizes, choices, strict=True) if choice >= 0)
        tensors = (dims for dims in (*rule.operands, *rule.results) if dims is not None)
        # Two padded factors in one dim put padding between elements, which no spec expresses.
        share_dim = any(len(padded.intersection(dim)) > 1 for dims in tensors for dim in dims)
        if share_dim or parts > MOST_PADDING * work_split(rule, choices, mesh):
            return False
    for result in range(len(rule.results)):
        kinds = {kind for choice in choices if (kind := partial_kind(rule, choice, result)) is not None}
        if len(kinds) > 1:
            return False
    return True


def _divides_another_part(rule: Rule, choices: Choices, mesh: MeshShape, index: int, size: int) -> bool:
    """Return True if an axis of `size` could split, without padding, another part of the same original factor."""
    factor = rule.factors[index]
    # A dynamic size is padded because its divisors are unknown, not because another part is better.
    if factor.base == factor.name or is_dynamic(factor.size):
        return False
    for place, part in enumerate(rule.factors):
        if part.base == factor.base and part.shardable and place != index:
            split = math.prod(axis for axis, choice in zip(mesh.sizes, choices, strict=True) if choice == place)
            if divides(size * split, part.size):
                return True
    return False


def uneven_axis(rule: Rule, choices: Choices, mesh: MeshShape, factor: int) -> int | None:
    """Return the mesh axis that pads a factor: the last that splits it, if it does not divide the remaining steps."""
    axes = [axis for axis, choice in enumerate(choices) if choice == factor and mesh.sizes[axis] > 1]
    if not axes or divides(math.prod(mesh.sizes[axis] for axis in axes), rule.factors[factor].size):
        return None
    return axes[-1]


def splits(rule: Rule, choice: int, factor: int) -> bool:
    """Return True if an axis with this choice splits a factor."""
    if choice == factor:
        return True
    # Groups are held with their rows, so splitting them also splits the sources of rows.
    return choice >= 0 and rule.factors[choice].routed == "group" and rule.factors[factor].routed == "source"


def local_size(rule: Rule, choices: Choices, mesh: MeshShape, factor: int, before: int | None = None) -> int:
    """Return the steps of a factor on one rank, padding included, as split by the axes before `before`, or by all."""
    size = rule.factors[factor].size
    for axis, choice in enumerate(choices[:before]):
        if splits(rule, choice, factor):
            size = ceil_div(size, mesh.sizes[axis])
    return size


def partial_kind(rule: Rule, choice: int, result: int) -> str | None:
    """Return the pending reduction of a result under a choice, if any, for a rule without variants."""
    if choice <= -2:
        return "sum"
    dims = rule.results[result]
    if choice == WHOLE or dims is None or _holds(rule, dims, choice):
        return None
    if rule.factors[choice].routed and len(rule.operands) + result in rule.routed:
        return None
    # If no operand has the factor, a result without it is equal on all ranks.
    if not any(_holds(rule, operand, choice) for operand in rule.operands):
        return None
    return rule.factors[choice].reduction(result)


def _holds(rule: Rule, dims: Dims, choice: int) -> bool:
    return any(splits(rule, choice, factor) for dim in dims for factor in dim)


def operand_spec(rule: Rule, choices: Choices, mesh: MeshShape, operand: int) -> Spec:
    """Return the spec in which the strategy takes an operand."""
    return operand_specs(rule, (choices,), mesh, operand)[0]


def operand_specs(rule: Rule, strategies: Iterable[Choices], mesh: MeshShape, operand: int) -> list[Spec]:
    """Return the `operand_spec` of many strategies."""

    def effect(variant: Rule, choice: int) -> _AxisEffect:
        kind = "sum" if choice <= -2 and operand in variant.linear[-2 - choice] else None
        return _axis_effect(variant, variant.operands[operand], choice, kind, operand in variant.routed)

    return _specs(rule, strategies, mesh, lambda variant: variant.operands[operand], effect)


def result_spec(rule: Rule, choices: Choices, mesh: MeshShape, result: int) -> Spec:
    """Return the spec of a result under the strategy; replicated for a result that is no tensor."""
    return result_specs(rule, (choices,), mesh, result)[0]


def result_specs(rule: Rule, strategies: Iterable[Choices], mesh: MeshShape, result: int) -> list[Spec]:
    """Return the `result_spec` of many strategies."""

    def effect(variant: Rule, choice: int) -> _AxisEffect:
        dims = variant.results[result]
        if dims is None:
            return _AxisEffect()
        routed = len(variant.operands) + result in variant.routed
        return _axis_effect(variant, dims, choice, partial_kind(variant, choice, result), routed)

    return _specs(rule, strategies, mesh, lambda variant: variant.results[result] or (), effect)


class _AxisEffect(NamedTuple):
    """The effect of a choice on one tensor, on the axis of the choice.

    Attributes:
        split: the loops that it splits, as pairs of a dim and a position among the factors of the dim.
        partial: the pending reduction, if any.
        routed: for routed rows, the arguments of the placement `Routed`.
    """

    split: tuple[tuple[int, int], ...] = ()
    partial: str | None = None
    routed: tuple[int | None, str] | None = None


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
"""The sizes of the factors of every dim of a tensor."""


def _specs(
    rule: Rule,
    strategies: Iterable[Choices],
    mesh: MeshShape,
    dims_of: Callable[[Rule], Dims],
    effect_of: Callable[[Rule, int], _AxisEffect],
) -> list[Spec]:
    """Return a spec per strategy, from the effects of its choices; equal effects share one spec."""
    # Hundreds of strategies have a handful of effects, numbered because hashing small integers is cheap.
    numbers: dict[_AxisEffect, int] = {}
    caches: dict[int, _SpecCache] = {}  # by the identity of the variant
    specs = []
    for choices in strategies:
        variant, chosen = resolve_variant(rule, choices) if rule.variants else (rule, choices)
        cache = caches.get(id(variant))
        if cache is None:
            sizes = tuple(tuple(variant.factors[factor].size for factor in dim) for dim in dims_of(variant))
            # A dynamic size equals the example's number, but gives other specs, so it is no key of a cache.
            dynamic = any(is_dynamic(size) for dim in sizes for size in dim)
            cache = caches[id(variant)] = _SpecCache(sizes, _spec if dynamic else _cached_spec)
        for choice in chosen:
            # All choices that split no dim of a tensor give it the same spec.
            if choice not in cache.effect_numbers:
                cache.effect_numbers[choice] = numbers.setdefault(effect_of(variant, choice), len(numbers))
        key = tuple(map(cache.effect_numbers.__getitem__, chosen))
        spec = cache.specs.get(key)
        if spec is None:
            effects = list(numbers)
            spec = cache.specs[key] = cache.make(cache.sizes, tuple(effects[number] for number in key), mesh)
        specs.append(spec)
    return specs


@dataclass(frozen=True, slots=True)
class _SpecCache:
    """The specs of one tensor under one variant.

    Attributes:
        sizes: sizes of the factors of every dim.
        make: the function from sizes, effects and mesh to a spec.
        effect_numbers: choice -> number of its effect.
        specs: numbers of the effects, one per axis -> spec.
    """

    sizes: _Sizes
    make: Callable[..., Spec]
    effect_numbers: dict[int, int] = field(default_factory=dict)
    specs: dict[tuple[int, ...], Spec] = field(default_factory=dict)


def _spec(sizes: _Sizes, effects: tuple[_AxisEffect, ...], mesh: MeshShape) -> Spec:
    """Return the spec of a tensor whose dims are products of factors.

    Within a factor, axes split in mesh order, the first axis outermost.
    """
    placements: list[Placement] = [Partial(effect.partial) if effect.partial else Replicate() for effect in effects]
    steps = [list(dim) for dim in sizes]  # local steps of every factor after the axes so far
    for axis, (effect, size) in enumerate(zip(effects, mesh.sizes, strict=True)):
        if effect.routed is not None and size > 1:
            placements[axis] = Routed(*effect.routed)
        for dim, place in effect.split if effect.routed is None else ():
            # torch's split factor is the number of local steps of the outer factors in the dim.
            outer = math.prod(steps[dim][:place])
            placements[axis] = shard_placement(dim, outer)
            if steps[dim][place] % size:
                # Blocks of whole steps of the factor, including its inner factors.
                block = ceil_div(steps[dim][place], size) * math.prod(steps[dim][place + 1 :])
                placements[axis] = BlockShard(dim, block, outer)
        for dim, place in effect.split:
            steps[dim][place] = ceil_div(steps[dim][place], size)
    spec = Spec.of(*placements)
    return canonical([math.prod(dim) for dim in sizes], spec, mesh) if spec.has_blocks else spec


# Most operators of a model have tensors with equal factors, since layers repeat.
_cached_spec = lru_cache(maxsize=1 << 16)(_spec)


def local_shape(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a shard, padding included, of a tensor of shape `whole`, under a rule without variants."""
    return tuple(
        math.prod(local_size(rule, choices, mesh, factor) for factor in dim) if dim else size
        for size, dim in zip(whole, dims, strict=True)
    )


def work_split(rule: Rule, choices: Choices, mesh: MeshShape) -> float:
    """Return the ratio of the operator's work to that of one rank; padding is work."""
    # Splitting sources or groups both split the work on routed rows, whose factor is the source.
    source = next((index for index, factor in enumerate(rule.factors) if factor.routed == "source"), None)
    split = dict.fromkeys(
        source if source is not None and rule.factors[choice].routed else choice for choice in choices if choice >= 0
    )
    return math.prod(
        int(rule.factors[factor].size) / max(int(local_size(rule, choices, mesh, factor)), 1) for factor in split
    )


def describe(rule: Rule, choices: Choices, mesh: MeshShape) -> str:
    """Return the strategy in words, such as `i on dp, k on tp`; `whole` when nothing is split."""
    factors = offered_factors(rule)
    parts = [
        f"{factors[choice].name if choice >= 0 else 'partial sum passes'} on {axis.name}"
        for axis, choice in zip(mesh.axes, choices, strict=True)
        if choice != WHOLE
    ]
    return ", ".join(parts) or "whole"


def keeps_shares(rule: Rule, choice: int, shared: SharedAxis) -> bool:
    """Return True if a choice for the shared axis keeps unequal shares.

    An operator on the shared size is split along it, or whole. Any other operator may be split in any way.
    """
    # No other factor has such shares, and no partial sum is scattered into them.
    factors = offered_factors(rule)
    if choice == WHOLE or not any(shared.is_of_whole(factor.size) for factor in factors):
        return True
    return choice >= 0 and shared.is_whole(factors[choice].size)


def splits_evenly(rule: Rule, choices: Choices, shared: SharedAxis, mesh: MeshShape) -> bool:
    """Return True if axes other than the shared one split dims of the shared size in multiples of it."""
    # A block of a part of the shared size could have the length of a share without being a share.
    factors, others = offered_factors(rule), [axis for axis in range(mesh.ndim) if axis != shared.axis]
    return all(
        shared.is_multiple(
            factors[factor].size, math.prod(mesh.sizes[axis] for axis in others if choices[axis] == factor)
        )
        for factor in {choices[axis] for axis in others if choices[axis] >= 0}
    )


# Many strategies at once, as arrays: on three axes an operator has hundreds.

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def is_plain(rule: Rule) -> bool:
    """Return True if a rule has no variants, dynamic sizes or routed rows, so that the array functions apply."""
    return not rule.variants and not any(factor.routed or is_dynamic(factor.size) for factor in rule.factors)


def fitting_choices(rule: Rule, per_axis: Sequence[Sequence[int]], mesh: MeshShape) -> tuple[Choices, ...]:
    """Return the combinations of a choice per axis that satisfy `fits`, in the order of a product."""
    every = tuple(itertools.product(*per_axis))
    if not is_plain(rule):
        return tuple(choices for choices in every if fits(rule, choices, mesh))
    table = np.array(every, dtype=np.int64)
    # Without padding, `fits` only requires one reduction per result; call it for the few padded ones.
    even, clear = is_evenly_split(rule, table, mesh), _has_one_reduction(rule, table)
    return tuple(
        choices
        for choices, is_even, is_clear in zip(every, even.tolist(), clear.tolist(), strict=True)
        if (is_clear if is_even else fits(rule, choices, mesh))
    )


def is_evenly_split(rule: Rule, table: IntArray, mesh: MeshShape) -> BoolArray:
    """Return, per row of `table` (`[strategies, axes]`), if axes divide the factors they split; for plain rules."""
    even = np.ones(len(table), dtype=np.bool_)
    for index, factor in enumerate(rule.factors):
        even &= factor.size % np.where(table == index, mesh.sizes, 1).prod(axis=1) == 0
    return even


def local_sizes(rule: Rule, table: IntArray, mesh: MeshShape) -> IntArray:
    """Return the local steps of every factor, padding included, as `[strategies, factors]`; for plain rules."""
    local = np.tile([factor.size for factor in rule.factors], (len(table), 1)).astype(np.int64)
    for axis, size in enumerate(mesh.sizes):
        split = table[:, axis, None] == np.arange(len(rule.factors))
        local[split] = -(-local[split] // size)  # the ceiling
    return local


def _has_one_reduction(rule: Rule, table: IntArray) -> BoolArray:
    """Return, per row, if all axes over which a result is partial have the same reduction."""
    clear = np.ones(len(table), dtype=np.bool_)
    for result in range(len(rule.results)):
        # Reductions as numbers, 0 for none: all others have to equal the largest.
        kinds: dict[str | None, int] = {None: 0}
        left = np.zeros_like(table)
        for choice in np.unique(table).tolist():
            kind = partial_kind(rule, choice, result)
            left[table == choice] = kinds.setdefault(kind, len(kinds))
        most = left.max(axis=1, initial=0)
        clear &= ((left == 0) | (left == most[:, None])).all(axis=1)
    return clear
