from __future__ import annotations

from typing import Any

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.soundness import compare, run_all_ranks, strategies
from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

SHAPES = [((4, 6, 12), (12,)), ((12, 4, 6), (4, 6)), ((12,), (12,))]


@pytest.mark.parametrize(("shape", "inner"), SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(shape: tuple[int, ...], inner: tuple[int, ...], affine: bool) -> None:
    weight, bias = (normal(*inner), normal(*inner) + 1) if affine else (None, None)
    x = 3 * normal(*shape) + 5
    assert_sound(aten.native_layer_norm.default, x, list(inner), weight, bias, 1e-5)
    _, mean, scale = aten.native_layer_norm(x, list(inner), weight, bias, 1e-5)
    assert_sound(
        aten.native_layer_norm_backward.default,
        *(normal(*shape) - 1, x, list(inner), mean, scale, weight, bias, [True, affine, affine]),
    )


def test_layer_norm_shards_batch_and_normalised_dims() -> None:
    x = normal(4, 6, 12)
    assert_sound(aten.native_layer_norm.default, x, [12], None, None, 1e-5, shards="dim0 dim1 n0")


def test_layer_norm_of_large_means_loses_nothing() -> None:
    x = (normal(4, 12) + 100).float()
    assert_sound(aten.native_layer_norm.default, x, [12], None, None, 1e-5)


def test_layer_norm_backward_leaves_out_what_is_not_asked_for() -> None:
    x, weight = normal(4, 12), normal(12)
    _, mean, scale = aten.native_layer_norm(x, [12], weight, weight, 1e-5)
    for mask in ([True, False, True], [False, True, False]):
        assert_sound(aten.native_layer_norm_backward.default, normal(4, 12), x, [12], mean, scale, weight, weight, mask)


def test_layer_norm_gradients_of_weights_are_partial_over_the_batch() -> None:
    x, weight = normal(4, 12), normal(12)
    _, mean, scale = aten.native_layer_norm(x, [12], weight, weight, 1e-5)
    _, rule = bound(
        aten.native_layer_norm_backward.default, x, x, [12], mean, scale, weight, weight, [True, True, True]
    )
    mesh = MeshShape.of({"x": 2})
    batch = rule.indices("dim0")
    assert [str(result_spec(rule, batch, mesh, result)) for result in range(3)] == ["S(0)", "P(sum)", "P(sum)"]


@pytest.mark.parametrize(("shape", "inner"), SHAPES)
def test_rms_norm(shape: tuple[int, ...], inner: tuple[int, ...]) -> None:
    x = normal(*shape) + 2
    assert_sound(aten._fused_rms_norm.default, x, list(inner), normal(*inner), 1e-5)
    assert_sound(aten._fused_rms_norm.default, x, list(inner), None, None)


def test_rms_norm_backward_over_sharded_dims() -> None:
    """The fused kernel is for accelerators alone, so that only the rule's own program can run here."""
    x, weight, gradient = (normal(4, 6, 12) + 1).requires_grad_(), normal(12).requires_grad_(), normal(4, 6, 12)
    result, scale = aten._fused_rms_norm(x, [12], weight, 1e-5)
    wanted = torch.autograd.grad(result, (x, weight), gradient)
    args: tuple[Any, ...] = (gradient, x.detach(), [12], scale.detach(), weight.detach(), [True, True])
    call = call_of(aten._fused_rms_norm_backward.default, args, {}, wanted)
    rule = rule_for(call)
    assert rule is not None
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    ran = [_assert_equal(call, rule, MeshShape.of(mesh), tensors, wanted) for mesh in ({"x": 4}, {"x": 2, "y": 2})]
    assert all(ran)


def _assert_equal(call: OpCall, rule: Rule, mesh: MeshShape, tensors: list[torch.Tensor], wanted: Any) -> int:
    """Compare all strategies that shard the normalised dim; how many there are."""
    count = 0
    for refined, choices in strategies(rule, mesh):
        if set(choices) & set(refined.indices("n0")):
            outputs = run_all_ranks(call, refined, choices, mesh, tensors)
            for position, (shards, whole) in enumerate(zip(outputs, wanted, strict=True)):
                assert shards is not None
                assert compare(shards, result_spec(refined, choices, mesh, position), mesh, whole) is None
            count += 1
    return count
