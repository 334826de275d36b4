from __future__ import annotations

import pytest
import torch

from autoshard.patterns.ops.view import with_merged_dims
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.soundness import compare, run_all_ranks, strategies
from autoshard.patterns.strategy import describe, operand_spec, result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import aten, bound, normal
from tests.patterns.units.unit_models import llama, plan_with, worst_error
from tests.training import TOLERANCE


def viewed(mesh: MeshShape, shape: tuple[int, ...], target: list[int]) -> tuple[OpCall, Rule]:
    call, rule = bound(aten.view.default, normal(*shape), target)
    return call, with_merged_dims(rule, call, mesh)


@pytest.mark.parametrize("mesh", [{"x": 8}, {"x": 8, "y": 2}, {"y": 2, "x": 4}])
def test_the_dim_as_a_whole_leaves_a_partial_sum(mesh: dict[str, int]) -> None:
    shape = MeshShape.of(mesh)
    parts = 8 if mesh["x"] == 8 else 2
    value, target = normal(4, 8, 6) if parts == 8 else normal(4, 36, 6), [4, 2, 4, 6] if parts == 8 else [4, 6, 6, 6]
    call, rule = viewed(shape, tuple(value.shape), target)
    assert len(rule.variants) == 1
    checked = set()
    for refined, choices in strategies(rule, shape):
        (shards,) = run_all_ranks(call, refined, choices, shape, [value])
        spec = result_spec(refined, choices, shape, 0)
        assert shards is not None
        assert compare(shards, spec, shape, value.view(target)) is None, describe(refined, choices, shape)
        checked.add(describe(refined, choices, shape))
    assert "whole1 on x" in checked


def test_specs_of_the_variant() -> None:
    mesh = MeshShape.of({"x": 8})
    _, rule = viewed(mesh, (4, 8, 6), [4, 2, 4, 6])
    choice = (len(rule.factors),)
    assert str(operand_spec(rule, choice, mesh, 0)) == "S(1)"
    assert str(result_spec(rule, choice, mesh, 0)) == "P(sum)"


@pytest.mark.parametrize(
    ("size", "shape", "target"),
    [(4, (4, 8, 6), [4, 2, 4, 6]), (3, (4, 8, 6), [4, 2, 4, 6]), (2, (4, 8), [32]), (1, (8,), [2, 4])],
)
def test_no_variant_where_parts_can_be_sharded_or_nothing_can(
    size: int, shape: tuple[int, ...], target: list[int]
) -> None:
    _, rule = viewed(MeshShape.of({"x": size}), shape, target)
    assert rule.variants == ()


def test_no_partial_sums_of_truth_values() -> None:
    call, rule = bound(aten.view.default, torch.ones(8, dtype=torch.bool), [2, 4])
    assert with_merged_dims(rule, call, MeshShape.of({"x": 8})) is rule


def test_whole_model_with_repeated_key_heads() -> None:
    """Backward of the repetition, on eight devices for eight heads over two of keys."""
    plan = plan_with(llama, {"tp": 8}, "view", "whole1")
    assert any(choice.strategy == "whole1 on tp" for choice in plan.choices)
    assert worst_error(llama, {"tp": 8}, plan=plan) < TOLERANCE
