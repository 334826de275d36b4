"""Strategies: one choice per mesh axis for one operator, and the specs that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.patterns.rule import Dims, Rule
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec, shard_placement

Choices = tuple[int, ...]
"""One choice per mesh axis: a factor's index; `WHOLE`; or `linear_choice(k)` for the k-th linear set of the rule."""

WHOLE = -1


def linear_choice(index: int) -> int:
    """The choice that passes partial sums through the rule's linear set `index`."""
    return -2 - index


def axis_choices(rule: Rule, size: int) -> tuple[int, ...]:
    """All choices for one mesh axis of `size` devices; `WHOLE` alone on an axis of one."""
    if size == 1:
        return (WHOLE,)
    factors = (index for index, factor in enumerate(rule.factors) if factor.shardable and _divides(size, factor.size))
    return (WHOLE, *factors, *(linear_choice(index) for index in range(len(rule.linear))))


def _divides(size: int, whole: int) -> bool:
    return whole > 0 and whole % size == 0


def fits(rule: Rule, choices: Choices, mesh: MeshShape) -> bool:
    """Whether the choices go together: sizes divide, and no result is partial in two ways at once."""
    for index, factor in enumerate(rule.factors):
        share = math.prod(mesh.sizes[axis] for axis, choice in enumerate(choices) if choice == index)
        if share > 1 and not _divides(share, factor.size):
            return False
    kinds: set[str] = set()
    for result in range(len(rule.results)):
        kinds = {kind for choice in choices if (kind := partial_kind(rule, choice, result)) is not None}
        if len(kinds) > 1:
            return False
    return True


def partial_kind(rule: Rule, choice: int, result: int) -> str | None:
    """The reduction that a choice leaves open on a result, if any."""
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
    partial = {
        axis: "sum" for axis, choice in enumerate(choices) if choice <= -2 and operand in rule.linear[-2 - choice]
    }
    return _spec(rule, rule.operands[operand], choices, mesh, partial)


def result_spec(rule: Rule, choices: Choices, mesh: MeshShape, result: int) -> Spec:
    """The spec in which the strategy leaves a result; replicated for a result that is no tensor."""
    dims = rule.results[result]
    if dims is None:
        return Spec.replicated(mesh.ndim)
    kinds = ((axis, partial_kind(rule, choice, result)) for axis, choice in enumerate(choices))
    return _spec(rule, dims, choices, mesh, {axis: kind for axis, kind in kinds if kind is not None})


def _spec(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, partial: dict[int, str]) -> Spec:
    """Placements of a tensor whose dims are products of factors.

    Within a factor, axes split in mesh order, the first axis outermost. An axis's split factor is the product of
    what stands left of it in its dim and belongs to no earlier axis, which is how torch reads placements.
    """
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, kind in partial.items():
        placements[axis] = Partial(kind)
    for dim, factors in enumerate(dims):
        left = 1  # product of the whole factors left of the current one
        later: list[tuple[int, int]] = []  # axes placed so far in this dim, with their sizes
        for factor in factors:
            axes = [axis for axis, choice in enumerate(choices) if choice == factor]
            for axis in axes:
                outer = left * math.prod(size for other, size in later if other > axis)
                placements[axis] = shard_placement(dim, outer)
                later.append((axis, mesh.sizes[axis]))
            left *= rule.factors[factor].size // math.prod(mesh.sizes[axis] for axis in axes)
    return Spec.of(*placements)


def local_shape(rule: Rule, dims: Dims, choices: Choices, mesh: MeshShape, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's shard of a tensor of shape `whole` under the strategy."""
    return tuple(
        size // math.prod(mesh.sizes[axis] for axis, choice in enumerate(choices) if choice in dim)
        for size, dim in zip(whole, dims, strict=True)
    )


def share(choices: Choices, mesh: MeshShape) -> int:
    """Into how many parts the strategy splits the operator's work."""
    return math.prod(mesh.sizes[axis] for axis, choice in enumerate(choices) if choice >= 0)


def describe(rule: Rule, choices: Choices, mesh: MeshShape) -> str:
    """The strategy in words, such as `i on dp, k on tp`; `whole` when nothing is split."""
    return ", ".join(_parts(rule, choices, mesh)) or "whole"


def _parts(rule: Rule, choices: Choices, mesh: MeshShape) -> Iterator[str]:
    for axis, choice in zip(mesh.axes, choices, strict=True):
        if choice >= 0:
            yield f"{rule.factors[choice].name} on {axis.name}"
        elif choice <= -2:
            yield f"partial sum passes on {axis.name}"
