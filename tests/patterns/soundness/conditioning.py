"""How many digits a call has: a local program may lose those that a change of the operands in the last digit takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.patterns.registry import rule_for
from autoshard.patterns.soundness import compare, reference_draws, run_all_ranks, strategies
from autoshard.patterns.strategy import describe, result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.soundness._torch import tree_leaves, tree_map_only
from tests.patterns.soundness.record import RecordedOperator

ALLOWED = 16
"""Times the change of a result that another last digit of the operands makes: sums in another order round otherwise."""

_TRIES = 4


def lost_digits(recorded: RecordedOperator, meshes: Sequence[MeshShape]) -> list[str]:
    """The strategies of a call that differ from one device by more than the last digits of its operands explain.

    Unlike `check`, which allows a share of the largest number, this knows how exact the answer can be: what one device
    computes of operands that are changed in the last digit says so. Calls that draw at random, and those without a
    rule, lose nothing.

    Args:
        recorded: the call, on real tensors.
        meshes: to run all strategies on.
    """
    rule = rule_for(recorded.call)
    draws = reference_draws(recorded.op, recorded.args, recorded.kwargs)
    if rule is None or draws.random:
        return []
    whole = draws.whole[0]
    uncertain = _uncertainties(recorded, whole)
    operands = [leaf for leaf in tree_leaves((recorded.args, recorded.kwargs)) if isinstance(leaf, torch.Tensor)]
    found = []
    for mesh in meshes:
        for refined, choices in strategies(rule, mesh):
            ranks = run_all_ranks(recorded.call, refined, choices, mesh, operands)
            for position, (shards, result) in enumerate(zip(ranks, whole, strict=True)):
                if shards is None or not result.is_floating_point() or not result.isfinite().all():
                    continue
                spec = result_spec(refined, choices, mesh, position)
                problem = compare(shards, spec, mesh, result, ALLOWED * uncertain[position])
                if problem is not None:
                    strategy = describe(refined, choices, mesh)
                    found.append(f"{recorded.op} in {recorded.source} with {strategy} on {mesh}: {problem}")
    return found


def add_to_operands(recorded: RecordedOperator, by: float) -> RecordedOperator | None:
    """The call with a number added to all floating operands; None where the operator does not take such operands."""

    def farther(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + by if tensor.is_floating_point() else tensor

    args, kwargs = tree_map_only(torch.Tensor, farther, (recorded.args, recorded.kwargs))
    try:
        return replace(recorded, args=args, kwargs=kwargs, results=recorded.op(*args, **kwargs))
    except RuntimeError:
        return None


def _uncertainties(recorded: RecordedOperator, whole: Sequence[Any]) -> list[float]:
    """For every result, its largest change where operands change in the last digit, beside its largest number."""
    changes = [0.0] * len(whole)
    for changed in _perturb_last_digit(recorded):
        for position, (value, result) in enumerate(zip(changed, whole, strict=True)):
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
                change = torch.nan_to_num((value - result).abs()).max().item()
                changes[position] = max(changes[position], change / max(1.0, result.abs().max().item()))
    return changes


def _perturb_last_digit(recorded: RecordedOperator) -> Iterator[tuple[Any, ...]]:
    """Results on one device of operands each of whose numbers is a little larger, smaller, or as it was."""
    generator = torch.Generator().manual_seed(0)

    def perturb(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        digits = torch.randint(-1, 2, tensor.shape, generator=generator) * torch.finfo(tensor.dtype).eps
        return tensor * (1 + digits.to(tensor.dtype))

    for _ in range(_TRIES):
        args, kwargs = tree_map_only(torch.Tensor, perturb, (recorded.args, recorded.kwargs))
        results = recorded.op(*args, **kwargs)
        yield tuple(results) if isinstance(results, (tuple, list)) else (results,)
