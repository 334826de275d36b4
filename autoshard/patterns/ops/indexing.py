"""Gathering by index.

Dims that index and operand share may be sharded, and the dims of the index itself. Where the indexed dim is sharded, a
rank looks up the indices within its stretch and returns zeros for the rest: the sum over ranks is the result (as for an
embedding with a sharded vocabulary).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import (
    argument_dim,
    if_sharded,
    localize_index,
    numbered_dims,
    positions,
    reshape_along,
)
from autoshard.patterns.ops.matmul import keep_on_first_rank
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import LocalProgram, NamedDims, OpCall, Rule, TensorMeta, build


def whole_if_bool(call: OpCall, names: Sequence[str]) -> list[str]:
    """The dims, which must be whole, of an operand of booleans, which cannot be summed; else none."""
    return list(names) if call.operands[0].dtype is torch.bool else []


def lookup_rule(
    call: OpCall,
    sizes: Mapping[str, int],
    operands: Sequence[NamedDims],
    result: NamedDims,
    names: Sequence[str],
    local: LocalProgram,
    whole: Collection[str] = (),
) -> Rule:
    """A look-up in the first operand along the factors `names`; every rank looks up within its stretches."""
    return build(
        sizes,
        operands,
        [result],
        whole=[*whole, *whole_if_bool(call, names)],
        contiguous=names,
        linear=[{0}],
        local=local,
        uneven=True,
        fill=dict.fromkeys(names),  # indices never point at padding
    )


@rule_maker("aten.index_select")
def _index_select(call: OpCall) -> Rule:
    operand, index = call.operands
    if not operand.shape:
        return build({}, [[], [[]] * len(index.shape)], [[]], linear=[{0}])
    sizes = numbered_dims(operand.shape)
    name = list(sizes)[call.arg("dim")]
    picked = ["index" if dim == name else dim for dim in sizes]
    operands = [list(sizes), ["index"] * len(index.shape)]
    sizes |= {"index": math.prod(index.shape)}
    return lookup_rule(call, sizes, operands, picked, [name], _local_index_select)


def _local_index_select(call: LocalCall) -> Any:
    table, index = call.operands
    shape = call.operand_shape(0)
    dim = argument_dim(call, len(shape))
    if not call.axes(f"d{dim}"):
        return call.run()
    place, outside = localize_index(call, index, f"d{dim}", shape[dim])
    if call.call.operands[1].shape:  # a 0-d index broadcasts as it is
        outside = reshape_along(outside, dim, len(shape))
    return call.run(operands=[table, place]).masked_fill(outside, 0)


def aligned_dims(tensors: Sequence[TensorMeta], dim: int) -> tuple[dict[str, int], list[str], list[list[str]]]:
    """Sizes, whole names and dims of tensors that share all dims but `dim`, where the first is indexed.

    A dim that the index does not cover entirely stays whole, with a separate name for every tensor. The indexed dim is
    `"indexed"` in the first tensor, and `"index"` in the others if their sizes are equal.
    """
    sizes: dict[str, int] = {}
    whole: list[str] = []
    dims: list[list[str]] = [[] for _ in tensors]
    for position in range(len(tensors[0].shape)):
        lengths = [tensor.shape[position] for tensor in tensors]
        for which, length in enumerate(lengths):
            name = f"d{position}_{which}"
            # A shared dim: a rank holds the same stretch of all tensors.
            if position != dim and len(set(lengths)) == 1:
                name = f"d{position}"
            elif position == dim and which == 0:
                name = "indexed"
            elif position == dim and len(set(lengths[1:])) == 1:
                name = "index"
            else:
                whole.append(name)
            sizes[name] = length
            dims[which].append(name)
    return sizes, whole, dims


@rule_maker("aten.gather")
def _gather(call: OpCall) -> Rule | None:
    operand, index = call.operands
    # Torch treats 0-d tensors as vectors of one element, for which rules have no dim.
    if not operand.shape or len(operand.shape) != len(index.shape):
        return None
    sizes, whole, dims = aligned_dims(call.operands, argument_dim(call, len(operand.shape)))
    return lookup_rule(call, sizes, dims, dims[1], ["indexed"], _local_gather, whole)


@if_sharded("indexed")
def _local_gather(call: LocalCall) -> Any:
    table, index = call.operands
    place, outside = localize_index(call, index, "indexed", call.operand_shape(0)[call.arg("dim")])
    return call.run(operands=[table, place]).masked_fill(outside, 0)


class AdvancedIndexing:
    """The dims of advanced indexing `operand[indices]`; None is a dim that is not indexed.

    Attributes:
        tensors: the indices.
        indexed: the dims of the operand that they index.
        sizes: size of every name: `d0`, ... for the dims of the operand, `index0`, ... for those of the indices.
        names: names of the dims that are indexed.
        source: dims of the operand.
        index_names: names of the dims of the indices.
        trailing_count: number of `picked_dims` behind those of the indices.
        picked_dims: dims of the indexed elements.
    """

    def __init__(self, operand: TensorMeta, indices: Sequence[TensorMeta | None]) -> None:
        padded = [*indices, *[None] * (len(operand.shape) - len(indices))]
        self.tensors = [index for index in padded if index is not None]
        self.indexed = [dim for dim, index in enumerate(padded) if index is not None]
        shape = torch.broadcast_shapes(*(index.shape for index in self.tensors))
        dims, index_dims = numbered_dims(operand.shape), numbered_dims(shape, "index")
        self.sizes = dims | index_dims
        self.names = [f"d{dim}" for dim in self.indexed]
        self.source = list(dims)
        self.index_names = list(index_dims)
        # The dims of the index replace the indexed dims if these are adjacent, and come first otherwise.
        first, last = self.indexed[0], self.indexed[-1]
        neighbours = self.indexed == list(range(first, last + 1))
        before = self.source[:first] if neighbours else []
        after = [name for name in self.source if name not in (*self.names, *before)]
        self.trailing_count = len(after)
        self.picked_dims = [*before, *self.index_names, *after]

    def broadcast(self, meta: TensorMeta, names: Sequence[str]) -> NamedDims:
        """Return the dims of a tensor that is broadcast to the dims `names`."""
        # Aligned to the right, as torch broadcasts.
        aligned = names[len(names) - len(meta.shape) :]
        return [[] if size == 1 else name for size, name in zip(meta.shape, aligned, strict=True)]

    def indices(self) -> list[NamedDims]:
        """Dims of every index tensor."""
        return [self.broadcast(meta, self.index_names) for meta in self.tensors]


def advanced_indexing(call: OpCall) -> AdvancedIndexing | None:
    """The dims of a call with advanced indices; None where one is a mask, or nothing is indexed."""
    indices = call.arg("indices")
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None  # masks: the size of the result depends on their values
    return AdvancedIndexing(call.operands[0], indices)


def localize_indices(
    call: LocalCall, dims: AdvancedIndexing, spare: bool = False, first: int = 1
) -> tuple[list[Any], Any]:
    """The indices of advanced indexing into the local operand, and a mask of those outside of it.

    Args:
        call: the call.
        dims: its dims.
        spare: True to set indices outside to the end of their dim (a spare row) instead of its start.
        first: position of the first index among the operands; the others follow.

    Returns:
        The indices, and a mask that broadcasts to the indexed elements; None where no indexed dim is sharded.
    """
    outside = None
    whole, local = call.call.operands[0].shape, call.operand_shape(0)
    indices = list(call.operands[first : first + len(dims.tensors)])
    for which, dim in enumerate(dims.indexed):
        if not call.axes(f"d{dim}"):
            continue
        index = non_negative_index(call, indices[which], whole[dim])
        indices[which], beyond = localize_index(call, index, f"d{dim}", local[dim], local[dim] if spare else 0)
        outside = beyond if outside is None else outside.logical_or(beyond)
    if outside is not None:
        outside = outside.reshape([*outside.shape, *[1] * dims.trailing_count])
    return indices, outside


def non_negative_index(call: LocalCall, index: Any, size: int) -> Any:
    """Convert negative indices into a dim of `size`, which count from the end, to non-negative ones."""
    behind = index + size
    return call.emit.where(index < 0, behind, index)


@rule_maker("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: OpCall) -> Rule | None:
    dims = advanced_indexing(call)
    if dims is None:
        return None

    def local(program: LocalCall) -> Any:
        indices, outside = localize_indices(program, dims)
        if outside is None:
            return program.run()
        picked = program.run(operands=[program.operands[0], *indices])
        return picked.masked_fill(outside, 0)

    return lookup_rule(call, dims.sizes, [dims.source, *dims.indices()], dims.picked_dims, dims.names, local)


@rule_maker("aten.take")
def _take(call: OpCall) -> Rule:
    """Elements by row-major position; the first dim may be sharded in stretches."""
    dims, index_dims = flat_dims(call)
    target = list(index_dims)
    return lookup_rule(call, dims | index_dims, [list(dims), target], target, ["d0"], _local_take, list(dims)[1:])


def flat_dims(call: OpCall) -> tuple[dict[str, int], dict[str, int]]:
    """Dims of an operand indexed by row-major position, and of the index."""
    operand, index, *_ = call.operands
    return numbered_dims(operand.shape), numbered_dims(index.shape, "index")


def localize_flat_index(call: LocalCall, outside_at: int) -> tuple[Any, Any]:
    """Row-major positions in the local operand, and a mask of those outside of it."""
    index = non_negative_index(call, call.operands[1], math.prod(call.call.operands[0].shape))
    return localize_index(call, index, "d0", math.prod(call.operand_shape(0)), outside_at)


@if_sharded("d0")
def _local_take(call: LocalCall) -> Any:
    place, outside = localize_flat_index(call, 0)
    return call.run(operands=[call.operands[0], place]).masked_fill(outside, 0)


@rule_maker("aten.one_hot")
def _one_hot(call: OpCall) -> Rule:
    """One-hot encoding, in which every rank marks its own classes."""
    sizes, result = numbered_dims(call.operands[0].shape), call.result
    target = [*sizes, "classes"]
    return build(
        sizes | {"classes": result.shape[-1]},
        [list(sizes)],
        [target],
        contiguous=["classes"],
        local=_local_one_hot,
        uneven=True,
    )


def _local_one_hot(call: LocalCall) -> Any:
    classes = call.result_shape()[-1]
    if not call.axes("classes"):
        return call.run(num_classes=classes)
    (index,) = call.operands
    # Compare every class: scattering ones would need a spare row for classes of other ranks.
    return index.unsqueeze(-1).eq(positions(call, "classes", classes, index.device)).to(torch.int64)


# Gathering and scattering by index under a mask, without checking masked indices.
#
# As for `index` and `index_put`, a rank of a sharded dim handles indices within its stretch; the rest is masked, too.


def _masked_dims(call: OpCall) -> AdvancedIndexing | None:
    """The dims of the call; None where an index is a mask, or the mask has more dims than the indexed elements."""
    dims = advanced_indexing(call)
    return dims if dims is not None and len(call.operands[1].shape) <= len(dims.picked_dims) else None


def _local_mask_and_indices(call: LocalCall, dims: AdvancedIndexing) -> list[Any]:
    """Mask and indices in the local operand; indices outside of it are masked.

    The operators clamp indices out of range.
    """
    values = list(call.operands)
    # Clamp by the size of the whole dim, before indices are made relative to a stretch.
    for place, dim in enumerate(dims.indexed, start=2):
        size = call.call.operands[0].shape[dim]
        values[place] = values[place].clamp(-size, size - 1)
    call.operands = tuple(values)
    indices, outside = localize_indices(call, dims, first=2)
    mask = call.operands[1]
    if outside is not None:
        mask = mask.logical_and(outside.logical_not())
    return [mask, *indices]


@rule_maker("aten._unsafe_masked_index")
def _masked_index(call: OpCall) -> Rule | None:
    """Masked elements become `fill`: only zeros may be summed over ranks; other numbers would count once per rank."""
    dims = _masked_dims(call)
    if dims is None:
        return None
    zero = call.arg("fill") == 0
    return build(
        dims.sizes,
        [dims.source, dims.broadcast(call.operands[1], dims.picked_dims), *dims.indices()],
        [dims.picked_dims],
        whole=whole_if_bool(call, dims.names) if zero else dims.names,
        contiguous=dims.names,
        linear=[{0}] if zero else [],
        local=lambda program: program.run(operands=[program.operands[0], *_local_mask_and_indices(program, dims)]),
    )


@rule_maker("aten._unsafe_masked_index_put_accumulate")
def _masked_index_put(call: OpCall) -> Rule | None:
    dims = _masked_dims(call)
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


# Operators with data-dependent sizes that are given as arguments (`nonzero_static`): operands are whole.

rule("aten.nonzero_static.default", "...! -> k! d!")
rule("aten.repeat_interleave.Tensor", "n! -> m!")
