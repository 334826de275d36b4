"""What an emitter offers whose program has a mesh axis of uneven shares."""

from __future__ import annotations

import math

from autoshard.patterns.rule import Rule
from autoshard.patterns.variants import WHOLE, Choices, offered_factors
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import EmitterWithShares
from autoshard.specs.shared_axis import SharedAxis


def is_share(emit: object, axis: int, size: int) -> bool:
    """Whether ranks of an axis hold shares of a size: all of a rank's share is true, and nothing pads it."""
    return isinstance(emit, EmitterWithShares) and emit.shared.axis == axis and emit.shared.is_whole(size)


def shares_of_ranks(emit: object, axis: int, size: int) -> list[int] | None:
    """What every rank of an axis holds of a size; None where the ranks do not hold shares of it."""
    if not isinstance(emit, EmitterWithShares) or not is_share(emit, axis, size):
        return None
    return [emit.share(emit.shared.share_of_rank(rank)) for rank in range(emit.shared.ranks)]


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
