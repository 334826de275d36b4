from __future__ import annotations

import pytest

from autoshard.capture.rms_norm import operators
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
    x, gradient = normal(*shape) + 2, normal(*shape) - 1
    for weight in (normal(*inner), None):
        assert_sound(operators.rms_norm.default, x, list(inner), weight, 1e-5)
        rstd = operators.rms_norm(x, list(inner), weight, 1e-5)[1]
        for mask in ([True, weight is not None], [weight is None, weight is not None]):
            assert_sound(operators.rms_norm_backward.default, gradient, x, list(inner), rstd, weight, mask)
