"""Strategies: one choice per mesh axis for one operator, and the specs that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.patterns.rule import Dims, Factor, Rule
from autoshard.patterns.variants import (
    WHOLE,
    Choices,
    linear_choice,
    offered_factors,
    offered_linear,
    resolved,
    variant_for,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical
from autoshard.specs.spec import BlockShard, Spec, shard_placement

__all__ = [
    "WHOLE",
    "Choices",
    "axis_choices",
    "describe",
    "fits",
    "linear_choice",
    "local_shape",
    "local_size",
    "operand_spec",
    "partial_kind",
    "result_spec",
    "share",
    "uneven_axis",
]

MOST_PADDING = 2
"""An axis that does not divide a factor is offered where padding makes at most so many times as much of it."""


def axis_choices(rule: Rule, size: int) -> tuple[int, ...]:
    """All choices for one mesh axis of `size` devices, of every variant; `WHOLE` alone on an axis of one."""
    if size == 1:
        return (WHOLE,)
    factors = (
        index
        for index, factor in enumerate(offered_factors(rule))
        if factor.shardable and (_divides(size, factor.size) or _pads(size, factor))
    )
    return (WHOLE, *factors, *(linear_choice(index) for index in range(len(offered_linear(rule)))))


def _divides(size: int, whole: int) -> bool:
    return whole > 0 and whole % size == 0


def _pads(size: int, factor: Factor, steps: int | None = None) -> bool:
    """Whether `size` ranks may split a factor, or the `steps` of it that others left, in blocks that are padded."""
    steps = factor.size if steps is None else steps
    return factor.uneven and steps > 1 and math.ceil(steps / size) * size <= MOST_PADDING * steps


def fits(rule: Rule, choices: Choices, mesh: MeshShape) -> bool:
    """Whether the choices go together.

    A variant knows all of them, the axes of a factor divide it, all but the last, which may pad it, no dim holds two
    factors that are padded, and no result is partial in two ways at once.
    """
    found = variant_for(rule, choices)
    if found is None:
        return False
    rule, choices = found
    padded = set()
    for index, factor in enumerate(rule.factors):
        sizes = [mesh.sizes[axis] for axis, choice in enumerate(choices) if choice == index and mesh.sizes[axis] > 1]
        if not sizes or _divides(math.prod(sizes), factor.size):
            continue
        above, left = divmod(factor.size, math.prod(sizes[:-1]))
        if left or not _pads(sizes[-1], factor, above) or (factor.contiguous and len(sizes) > 1):
            return False
        padded.add(index)
    if len(padded) > 1 and _meet(rule, padded):
        return False
    kinds: set[str] = set()
    for result in range(len(rule.results)):
        kinds = {kind for choice in choices if (kind := partial_kind(rule, choice, result)) is not None}
        if len(kinds) > 1:
            return False
    return True


def uneven_axis(rule: Rule, choices: Choices, mesh: MeshShape, factor: int) -> int | None:
    """The mesh axis that pads a factor: the last that chose it, where it does not divide what the others left."""
    axes = [axis for axis, choice in enumerate(choices) if choice == factor and mesh.sizes[axis] > 1]
    if not axes or _divides(math.prod(mesh.sizes[axis] for axis in axes), rule.factors[factor].size):
        return None
    return axes[-1]


def _meet(rule: Rule, factors: set[int]) -> bool:
    """Whether some dim holds two of the factors."""
    tensors = (dims for dims in (*rule.operands, *rule.results) if dims is not None)
    return any(len(factors.intersection(dim)) > 1 for dims in tensors for dim in dims)


def local_size(rule: Rule, choices: Choices, mesh: MeshShape, factor: int, before: int | None = None) -> int:
    """Steps of a factor that one rank runs, padding included; only axes before the axis `before` count."""
    size = rule.factors[factor].size
    for axis, choice in enumerate(choices[:before]):
        if choice == factor:
            size = math.ceil(size / mesh.sizes[axis])
    return size


def partial_kind(rule: Rule, choice: int, result: int) -> str | None:
    """The reduction that a choice, of the factors of a rule without variants, leaves open on a result, if any."""
    if choice <= -2:
        return "sum"
    dims = rule.results[result]
    if choice == WHOLE or dims is None or _holds(dims, choice):
        return None
    if not any(_holds(operand, choice) for operand in rule.operands):
        return None
    return rule.factors[choice].reduction(result)


def _holds(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


def operand_spec(rule: Rule, choices: Choices, mesh: MeshShape, operand: int) -> Spec:
    """The spec in which the strategy takes an operand."""
    rule, choices = resolved(rule, choices)
    partial = {
        axis: "sum" for axis, choice in enumerate(choices) if choice <= -2 and operand in rule.linear[-2 - choice]
    }
    return _spec(rule, rule.operands[operand], choices, mesh, partial)


def result_spec(rule: Rule, choices: Choices, mesh: MeshShape, result: int) -> Spec:
    """The spec in which the strategy leaves a result; replicated for a result that is no tensor."""
    rule, choices = resolved(rule, choices)
    dims = rule.results[result]
    if dims is None:
        return Spec.replicated(mesh.ndim)
    kinds = ((axis, partial_kind(rule, choice, result)) for axis, choice in enumerate(choices))
    return _spec(rule, dims, choices, mesh, {axis: kind for axis, kind in kinds if kind is not None})


def _spec(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, partial: dict[int, str]) -> Spec:
    """Placements of a tensor whose dims are products of factors.

    Within a factor, axes split in mesh order, the first axis outermost. An axis' split factor is the product of what
    stands left of it in its dim when the axes before it have split the tensor, which is how torch reads placements.
    Where the axis does not divide its factor, blocks are made of whole steps of the factor.
    """
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, kind in partial.items():
        placements[axis] = Partial(kind)
    for dim, factors in enumerate(dims):
        for axis in (axis for axis, choice in enumerate(choices) if choice in factors):
            place, size = factors.index(choices[axis]), mesh.sizes[axis]
            steps = [local_size(rule, choices, mesh, factor, axis) for factor in factors]
            outer = math.prod(steps[:place])
            placements[axis] = shard_placement(dim, outer)
            if steps[place] % size:
                block = math.ceil(steps[place] / size) * math.prod(steps[place + 1 :])
                placements[axis] = BlockShard(dim, block, outer)
    spec = Spec.of(*placements)
    if not spec.has_blocks:
        return spec
    return canonical([math.prod(rule.factors[factor].size for factor in dim) for dim in dims], spec, mesh)


def local_shape(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's shard, padding included, of a tensor of shape `whole`, under a rule without variants."""
    return tuple(
        math.prod(local_size(rule, choices, mesh, factor) for factor in dim) if dim else size
        for size, dim in zip(whole, dims, strict=True)
    )


def share(rule: Rule, choices: Choices, mesh: MeshShape) -> float:
    """Into how many parts of the size of a rank's the strategy splits the operator's work; padding is work."""
    return math.prod(
        rule.factors[choice].size / max(local_size(rule, choices, mesh, choice), 1)
        for choice in dict.fromkeys(choices)
        if choice >= 0
    )


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
