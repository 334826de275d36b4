from __future__ import annotations

import pytest
import torch

from autoshard.patterns.soundness import strategies
from autoshard.patterns.strategy import describe, offered_factors, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from tests.operators.attention.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
from tests.patterns.ops.soundness import assert_sound, bound, normal
from tests.patterns.units.unit_models import attention_model, plan_with, worst_error
from tests.training import TOLERANCE

MESH = MeshShape.of({"x": 4})

# one key head for all queries of a rank; several ranks with one; ranks whose queries need several
HEADS = [(8, 2), (4, 1), (12, 6), (12, 3)]


def _tensors(heads: int, groups: int) -> list[torch.Tensor]:
    return [normal(4, heads, 6, 8), normal(4, groups, 6, 8), normal(4, groups, 6, 8) + 1]


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_backward(heads: int, groups: int, causal: bool) -> None:
    tensors = _tensors(heads, groups)
    _, rule = bound(FORWARD, *forward_args(tensors, causal))
    assert "g" in {factor.name for factor in offered_factors(rule)}
    assert "g on x" in {describe(refined, choices, MESH) for refined, choices in strategies(rule, MESH)}
    assert_sound(FORWARD, *forward_args(tensors, causal))
    assert_sound(BACKWARD, *backward_args(normal(4, heads, 6, 8) - 1, tensors, causal))


def test_with_a_mask_of_heads() -> None:
    tensors, mask = _tensors(8, 2), normal(4, 8, 6, 6)
    assert_sound(FORWARD, *forward_args(tensors, mask=mask))
    assert_sound(BACKWARD, *backward_args(normal(4, 8, 6, 8), tensors, mask=mask, mask_gradient=True))


def test_keys_stay_whole_and_their_gradients_are_partial() -> None:
    tensors = _tensors(8, 2)
    for op, args, specs in (
        (FORWARD, forward_args(tensors), ["S(1)", "R", "R"]),
        (BACKWARD, backward_args(tensors[0], tensors), ["S(1)", "S(1)", "R", "R"]),
    ):
        _, rule = bound(op, *args)
        choice = ([factor.name for factor in offered_factors(rule)].index("g"),)
        assert [str(operand_spec(rule, choice, MESH, operand)) for operand in range(len(specs))] == specs
    assert [str(result_spec(rule, choice, MESH, result)) for result in range(3)] == ["S(1)", "P(sum)", "P(sum)"]


def test_as_many_key_heads_need_no_variant() -> None:
    _, rule = bound(FORWARD, *forward_args(_tensors(6, 6)))
    assert "g" not in {factor.name for factor in offered_factors(rule)}


def test_whole_model_on_four_times_as_many_devices_as_key_heads() -> None:
    assert (
        worst_error(attention_model, {"tp": 8}, plan=plan_with(attention_model, {"tp": 8}, "attention", "g"))
        < TOLERANCE
    )
