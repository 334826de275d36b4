from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.patterns.soundness import strategies
from autoshard.patterns.strategy import describe, operand_spec, result_spec
from autoshard.patterns.variants import offered_factors
from autoshard.plan import ShardingPlan
from autoshard.planner.options import OptionTables
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.patterns.units.whole import attention_model, plan_with, worst_error
from tests.training import TOLERANCE
from tests.workers import Workers

FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
MESH = MeshShape.of({"x": 4})


def tensors(heads: int = 4, groups: int = 4, keys: int = 12) -> list[Tensor]:
    return [normal(2, heads, 12, 8), normal(2, groups, keys, 8), normal(2, groups, keys, 8) + 1]


def choice_of(rule: Any, name: str) -> int:
    return [factor.name for factor in offered_factors(rule)].index(name)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_backward(heads: int, groups: int, causal: bool) -> None:
    args = tensors(heads, groups)
    _, rule = bound(FORWARD, *args, 0.0, causal)
    assert "n on x" in {describe(refined, choices, MESH) for refined, choices in strategies(rule, MESH)}
    assert_sound(FORWARD, *args, 0.0, causal)
    assert_sound(BACKWARD, normal(2, heads, 12, 8) - 1, *args, *FORWARD(*args, 0.0, causal), 0.0, causal)


def test_scores_far_apart_do_not_overflow() -> None:
    """Later keys, which a causal mask hides, may score so much higher that their exponential is infinite."""
    query, key, value = tensors()
    args = (query, key * torch.linspace(1, 2000, 12, dtype=torch.float64).unsqueeze(-1), value)
    assert_sound(BACKWARD, normal(2, 4, 12, 8) - 1, *args, *FORWARD(*args, 0.0, True), 0.0, True)


def test_everything_lies_along_the_sequence() -> None:
    args = tensors()
    _, rule = bound(BACKWARD, args[0], *args, *FORWARD(*args), 0.0, True)
    choices = (choice_of(rule, "n"),)
    assert {str(operand_spec(rule, choices, MESH, operand)) for operand in range(6)} == {"S(2)"}
    assert {str(result_spec(rule, choices, MESH, result)) for result in range(3)} == {"S(2)"}


def test_every_rank_sends_its_keys_in_turn() -> None:
    args = tensors()
    call, rule = bound(FORWARD, *args, 0.0, True)
    tables = OptionTables(CostModel(Cluster.preset("h100"), MESH))
    sent = tables.exchanges(rule, (choice_of(rule, "n"),))
    assert sent == [("broadcast", 0, 2 * call.operands[1].bytes // 4)] * 4


@pytest.mark.parametrize("mask", [True, False])
def test_no_variant_with_a_mask_or_with_another_number_of_keys(mask: bool) -> None:
    args = tensors(keys=12 if mask else 8)
    _, rule = bound(FORWARD, *args, 0.0, False, **({"attn_mask": normal(12, 12)} if mask else {}))
    assert rule.variants == ()


@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_accelerators(causal: bool) -> None:
    """A causal kernel without a mask can have its sequence sharded only so."""
    query = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    _, rule = bound(aten._scaled_dot_product_flash_attention.default, query, query, query, 0.0, causal)
    assert [factor.name for factor in offered_factors(rule) if factor.name == "n" and factor.shardable] == ["n"]


@pytest.mark.parametrize("mesh", [{"cp": 4}, {"dp": 2, "cp": 2}])
def test_whole_model_with_keys_passed_round(mesh: dict[str, int]) -> None:
    plan = plan_with(attention_model, mesh, "attention", "n")
    assert worst_error(attention_model, mesh, plan=plan) < TOLERANCE


def test_ranks_that_are_no_neighbours() -> None:
    """The sequence on the first axis, in one process and in four: a stretch comes from its place in the group."""
    mesh = {"cp": 2, "tp": 2}
    plan = plan_with(attention_model, mesh, "attention", "n", axis=0)
    assert worst_error(attention_model, mesh, plan=plan) < TOLERANCE
    with Workers(4) as workers:
        assert max(workers.run(worst_error_on_processes, plan.to_json())) < TOLERANCE


def worst_error_on_processes(plan: str) -> float:
    return worst_error(attention_model, {"cp": 2, "tp": 2}, processes=True, plan=ShardingPlan.from_json(plan))
