"""Gathering and scattering by index where a mask says so, without looking whether indices elsewhere are in range.

As for `index` and `index_put`, a rank of a sharded dim takes what falls into its stretch: the rest is masked besides.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.indexing import AdvancedIndexing, advanced_indexing, localize_indices, whole_if_bool
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _dims(call: OpCall) -> AdvancedIndexing | None:
    """The dims of the call; None where an index is a mask itself, or the mask has more dims than what is picked."""
    dims = advanced_indexing(call)
    return dims if dims is not None and len(call.operands[1].shape) <= len(dims.picked_dims) else None


def _local_mask_and_indices(call: LocalCall, dims: AdvancedIndexing) -> list[Any]:
    """Mask and indices as they count in the local operand; elsewhere is masked.

    The operators take an index out of range as the end that is next.
    """
    values = list(call.operands)
    for place, dim in enumerate(dims.indexed, start=2):
        size = call.call.operands[0].shape[dim]
        values[place] = call.emit.clamp(values[place], -size, size - 1)
    call.operands = tuple(values)
    indices, outside = localize_indices(call, dims, first=2)
    mask = call.operands[1]
    if outside is not None:
        inside = call.emit.logical_not(outside)
        mask = call.emit.logical_and(mask, inside)
    return [mask, *indices]


@rule_maker("aten._unsafe_masked_index")
def _masked_index(call: OpCall) -> Rule | None:
    """What is masked is a number: zeros add nothing to the sum over ranks, any other would count once for each."""
    dims = _dims(call)
    if dims is None:
        return None
    return build(
        dims.sizes,
        [dims.source, dims.broadcast(call.operands[1], dims.picked_dims), *dims.indices()],
        [dims.picked_dims],
        whole=whole_if_bool(call, dims.names) if call.arg("fill") == 0 else dims.names,
        contiguous=dims.names,
        linear=[{0}] if call.arg("fill") == 0 else [],
        local=lambda program: program.run(operands=[program.operands[0], *_local_mask_and_indices(program, dims)]),
    )


@rule_maker("aten._unsafe_masked_index_put_accumulate")
def _masked_index_put(call: OpCall) -> Rule | None:
    dims = _dims(call)
    values = call.operands[-1]
    if dims is None or len(values.shape) > len(dims.picked_dims):
        return None

    def local(program: LocalCall) -> Any:
        target, *_, added = keep_on_first_rank(program, 0, dims.index_names)
        return program.run(operands=[target, *_local_mask_and_indices(program, dims), added])

    mask = dims.broadcast(call.operands[1], dims.picked_dims)
    return build(
        dims.sizes,
        [dims.source, mask, *dims.indices(), dims.broadcast(values, dims.picked_dims)],
        [dims.source],
        contiguous=dims.names,
        linear=[{0, len(call.operands) - 1}],
        local=local,
    )
