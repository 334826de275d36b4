"""What torch's own registry of sharding strategies offers for a call on one mesh axis, and whether it holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autoshard.patterns.borrowed import torch_strategies
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.rule import Rule
from autoshard.patterns.soundness import compare, shard_unevenly
from autoshard.patterns.strategy import axis_choices, fits, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from tests.patterns.soundness._torch import OpOverload, is_composite, tree_leaves, tree_map_only
from tests.patterns.soundness.record import RecordedOperator

Offer = tuple[tuple[Placement, ...], tuple[Placement, ...]]
"""Placements of all operands and of all results on one axis."""

_REGISTRY = DTensor._op_dispatcher.sharding_propagator


def torch_operators() -> list[OpOverload]:
    """The operators that torch has strategies for and that a captured graph can hold: functional, and not composite."""
    known = {*_REGISTRY.op_single_dim_strategy_funcs, *_REGISTRY.op_strategy_funcs, *_REGISTRY.op_to_rules}
    own = (op for op in known if op.namespace == "aten")  # users may have registered more
    functional = (op for op in own if not op._schema.is_mutable and not is_composite(op))
    return sorted(functional, key=str)


def torch_offers(recorded: RecordedOperator, size: int) -> set[Offer]:
    """The strategies of torch in which `size` divides every dim that is sharded; none where it does not answer."""
    try:
        offers = torch_strategies(recorded.call)
    except Exception:  # torch's strategy functions raise whatever they like on what they do not expect
        return set()
    operands, results = _tensors((recorded.args, recorded.kwargs)), _tensors(recorded.results)
    found = set()
    for strategy in offers:
        outs = tuple(place for place in strategy.results if place is not None)
        # Of a lookup in shards of a table torch makes a partial result that carries its mask: no placement of ours.
        known = all(isinstance(each, (Replicate, Shard)) or type(each) is Partial for each in strategy.operands + outs)
        if len(outs) == len(results) and known and not _adds_integers(strategy.operands, operands):
            offer = (_normal(strategy.operands, operands), _normal(outs, results))
            if not all(placement.is_replicate() for placement in offer[0]) and _even(offer, operands, results, size):
                found.add(offer)
    return found


def _adds_integers(placements: Sequence[Placement], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether integers or truth values would be partial results: these are reduced at once here."""
    pairs = zip(placements, tensors, strict=True)
    return any(
        isinstance(placement, Partial) and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
        for placement, tensor in pairs
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _normal(placements: Sequence[Placement], tensors: Sequence[torch.Tensor]) -> tuple[Placement, ...]:
    """The placements with dims counted from the front; a dim of size one is not sharded."""
    normal = []
    for placement, tensor in zip(placements, tensors, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim % max(1, tensor.ndim)
            placement = Shard(dim) if dim < tensor.ndim and tensor.shape[dim] != 1 else Replicate()
        normal.append(placement)
    return tuple(normal)


def _even(offer: Offer, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor], size: int) -> bool:
    pairs = itertools.chain(zip(offer[0], operands, strict=True), zip(offer[1], results, strict=True))
    return all(
        not isinstance(placement, Shard) or (tensor.shape[placement.dim] and tensor.shape[placement.dim] % size == 0)
        for placement, tensor in pairs
    )


def own_offers(recorded: RecordedOperator, rule: Rule, size: int) -> set[Offer]:
    """The strategies of a rule on an axis of `size`, in the same form."""
    mesh = MeshShape.of({"x": size})
    operands, results = _tensors((recorded.args, recorded.kwargs)), _tensors(recorded.results)
    places = [index for index, dims in enumerate(rule.results) if dims is not None]
    return {
        (
            _normal([operand_spec(rule, (choice,), mesh, index)[0] for index in range(len(operands))], operands),
            _normal([result_spec(rule, (choice,), mesh, index)[0] for index in places], results),
        )
        for choice in axis_choices(rule, size)
        if fits(rule, (choice,), mesh)
    }


def is_covered(offer: Offer, own: set[Offer]) -> bool:
    """Whether a rule offers as much: the same operands, and of every result the same, the whole, or another partial."""

    def as_good(mine: Placement, theirs: Placement) -> bool:
        return mine in (theirs, Replicate()) or (isinstance(mine, Partial) and isinstance(theirs, Partial))

    return any(ins == offer[0] and all(map(as_good, outs, offer[1])) for ins, outs in own)


def passes_sums_only(offer: Offer) -> bool:
    """Whether no operand is partial in another way than a sum."""
    return all(not isinstance(placement, Partial) or placement.reduce_op == "sum" for placement in offer[0])


def holds(recorded: RecordedOperator, offer: Offer, size: int) -> bool:
    """Whether the operator itself, run on the shards, gives shards of its result; sums are split as `check` does.

    Args:
        offer: a strategy whose operands are sharded, replicated, or partial sums.
    """
    mesh = MeshShape.of({"x": size})
    operands = _tensors((recorded.args, recorded.kwargs))
    shards = [shard_unevenly(tensor, Spec.of(each), mesh) for tensor, each in zip(operands, offer[0], strict=True)]
    values = iter(PerRank(tuple(shard[place] for place in mesh.coordinates())) for shard in shards)
    args, kwargs = tree_map_only(torch.Tensor, lambda _: next(values), (recorded.args, recorded.kwargs))
    try:
        results = Lockstep(mesh).call(recorded.op, *args, **kwargs)
    except Exception:  # an operator raises whatever it likes on shapes that do not fit its arguments
        return False
    outputs = results if isinstance(results, tuple) else (results,)
    wholes = recorded.results if isinstance(recorded.results, (tuple, list)) else (recorded.results,)
    pairs = [(output, whole) for output, whole in zip(outputs, wholes, strict=True) if isinstance(whole, torch.Tensor)]
    return all(
        compare(dict(zip(mesh.coordinates(), output.values, strict=True)), Spec.of(each), mesh, whole, 1e-9) is None
        for (output, whole), each in zip(pairs, offer[1], strict=True)
    )
