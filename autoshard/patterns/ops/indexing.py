"""Gathering and scattering by index.

Dims that are indexed stay whole; dims along which index and operand run side by side may be sharded; the dims of
the index itself may be sharded, and where their elements are added into the result, they leave partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.matmul import first_only
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta

rule("aten.one_hot", "... -> ... classes!")


def _named(meta: TensorMeta) -> dict[str, int]:
    return {f"d{dim}": size for dim, size in enumerate(meta.shape)}


def _with_index(source: list[list[str]], dim: int) -> list[list[str]]:
    return [["index"] if position == dim else names for position, names in enumerate(source)]


@rule_maker("aten.index_select")
def _index_select(call: OpCall) -> Rule:
    operand, index = call.operands
    if not operand.shape:
        return build({}, [[], [[]] * len(index.shape)], [[]], linear=[{0}])
    dim = call.arg("dim") % len(operand.shape)
    sizes = _named(operand) | {"index": call.results[0].shape[dim] if call.results[0] else 1}
    source = [[name] for name in _named(operand)]
    target = _with_index(source, dim)
    return build(sizes, [source, [["index"]] * len(index.shape)], [target], whole=[f"d{dim}"], linear=[{0}])


@rule_maker("aten.index_add")
def _index_add(call: OpCall) -> Rule | None:
    """The elements added are a contracted factor; what they are added to counts once."""
    operand, index, added = call.operands
    if not operand.shape or not index.shape or len(added.shape) != len(operand.shape):
        return None
    dim = call.arg("dim") % len(operand.shape)
    source = [[name] for name in _named(operand)]
    return build(
        _named(operand) | {"index": index.shape[0]},
        [source, [["index"]], _with_index(source, dim)],
        [source],
        whole=[f"d{dim}"],
        linear=[{0, 2}],
        local=_added_to_first,
    )


def _added_to_first(call: LocalCall) -> Any:
    names = dict.fromkeys(factor.base for factor in call.rule.factors if factor.base.startswith("index"))
    return call.run(operands=first_only(call, 0, list(names)))


def _side_by_side(call: OpCall, tensors: Sequence[TensorMeta], dim: int) -> tuple[dict[str, int], list[str], list[Any]]:
    """Sizes, whole names and dims of tensors that run side by side in all dims but `dim`, where the first is indexed.

    A dim that the index does not cover entirely stays whole, under a name of its own for every tensor.
    """
    sizes: dict[str, int] = {}
    whole: list[str] = []
    dims: list[list[list[str]]] = [[] for _ in tensors]
    for position in range(len(tensors[0].shape)):
        lengths = [tensor.shape[position] for tensor in tensors]
        for which, length in enumerate(lengths):
            if position == dim:
                covered = which > 0 and len(set(lengths[1:])) == 1
                name = "index" if covered else f"d{position}_{which}"
            else:
                covered = len(set(lengths)) == 1
                name = f"d{position}" if covered else f"d{position}_{which}"
            if not covered:
                whole.append(name)
            sizes[name] = length
            dims[which].append([name])
    return sizes, whole, dims


@rule_maker("aten.gather")
def _gather(call: OpCall) -> Rule | None:
    operand, index = call.operands
    if not operand.shape or len(operand.shape) != len(index.shape):
        return None
    sizes, whole, dims = _side_by_side(call, call.operands, call.arg("dim") % len(operand.shape))
    return build(sizes, dims, [dims[1]], whole=whole, linear=[{0}])


@rule_maker("aten.scatter_add")
def _scatter_add(call: OpCall) -> Rule | None:
    """The elements added are a contracted factor; what they are added to counts once."""
    operand = call.operands[0]
    if not operand.shape or any(len(meta.shape) != len(operand.shape) for meta in call.operands):
        return None
    sizes, whole, dims = _side_by_side(call, call.operands, call.arg("dim") % len(operand.shape))
    return build(sizes, dims, [dims[0]], whole=whole, linear=[{0, 2}], local=_added_to_first)


@rule_maker("aten.scatter.src", "aten.scatter.value")
def _scatter(call: OpCall) -> Rule | None:
    """Elements that overwrite others: the indexed dim stays whole everywhere."""
    operand = call.operands[0]
    if not operand.shape or any(len(meta.shape) != len(operand.shape) for meta in call.operands):
        return None
    sizes, whole, dims = _side_by_side(call, call.operands, call.arg("dim") % len(operand.shape))
    overwritten_by_zero = len(call.operands) == 2 and call.arg("value") == 0
    linear = [{0, 2}] if len(call.operands) == 3 else [{0}] if overwritten_by_zero else []
    return build(sizes, dims, [dims[0]], whole=[*whole, "index"], linear=linear)


class _Advanced:
    """The dims of advanced indexing: `operand[indices]`, where None stands for a dim that is not indexed."""

    def __init__(self, operand: TensorMeta, indices: Sequence[TensorMeta | None]) -> None:
        padded = [*indices, *[None] * (len(operand.shape) - len(indices))]
        self.tensors = [index for index in padded if index is not None]
        indexed = [dim for dim, index in enumerate(padded) if index is not None]
        shape = torch.broadcast_shapes(*(index.shape for index in self.tensors))
        self.sizes = _named(operand) | {f"index{dim}": size for dim, size in enumerate(shape)}
        self.whole = [f"d{dim}" for dim in indexed]
        self.source = [[f"d{dim}"] for dim in range(len(operand.shape))]
        self.index_names = [f"index{dim}" for dim in range(len(shape))]
        # The dims of the index stand where the indexed dims were, or first if those were not neighbours.
        neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
        before = [names for dim, names in enumerate(self.source) if dim < indexed[0]] if neighbours else []
        after = [names for dim, names in enumerate(self.source) if dim not in indexed and names not in before]
        self.taken = [*before, *([name] for name in self.index_names), *after]

    def broadcast(self, meta: TensorMeta, names: list[list[str]]) -> list[list[str]]:
        """Dims of a tensor that is broadcast to the dims `names`."""
        aligned = names[len(names) - len(meta.shape) :]
        return [[] if size == 1 else list(dim) for size, dim in zip(meta.shape, aligned, strict=True)]

    def indices(self) -> list[list[list[str]]]:
        """Dims of every index tensor."""
        return [self.broadcast(meta, [[name] for name in self.index_names]) for meta in self.tensors]


def _advanced(call: OpCall) -> _Advanced | None:
    indices = call.arg("indices")
    tensors = [index for index in indices if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None  # masks: the size of the result depends on their values
    return _Advanced(call.operands[0], indices)


@rule_maker("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: OpCall) -> Rule | None:
    dims = _advanced(call)
    if dims is None:
        return None
    return build(dims.sizes, [dims.source, *dims.indices()], [dims.taken], whole=dims.whole, linear=[{0}])


@rule_maker("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: OpCall) -> Rule | None:
    """Where values are added up, the dims of the index are contracted; where they overwrite, these stay whole."""
    dims = _advanced(call)
    if dims is None:
        return None
    values = call.operands[-1]
    if len(values.shape) > len(dims.taken):
        return None
    accumulate = call.arg("accumulate")
    return build(
        dims.sizes,
        [dims.source, *dims.indices(), dims.broadcast(values, dims.taken)],
        [dims.source],
        whole=dims.whole if accumulate else [*dims.whole, *dims.index_names],
        linear=[{0, len(call.operands) - 1}],
        local=_added_to_first,
    )
