"""Rules of layer, root-mean-square, group and batch normalisation, against torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard.operators.norms import operators
from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks, relative_difference

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


@pytest.mark.parametrize(("shape", "groups"), [((4, 12, 3, 2), 6), ((4, 12, 4, 3), 2), ((2, 8), 4), ((4, 12, 6), 1)])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(shape: tuple[int, ...], groups: int, affine: bool) -> None:
    x, channels = 2 * normal(*shape) + 3, shape[1]
    positions = x[0, 0].numel()
    weight, bias = (normal(channels) + 1, normal(channels)) if affine else (None, None)
    sizes = (shape[0], channels, positions, groups)
    assert_sound(aten.native_group_norm.default, x, weight, bias, *sizes, 1e-5)
    _, mean, scale = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    mask = [True, affine, affine]
    backward = aten.native_group_norm_backward.default
    assert_sound(backward, normal(*shape) + 1, x, mean, scale, weight, *sizes, mask)


def test_what_is_not_asked_for_is_left_out() -> None:
    x, weight = normal(4, 12, 6), normal(12)
    _, mean, scale = aten.native_group_norm(x, weight, weight, 4, 12, 6, 2, 1e-5)
    for mask in ([True, False, False], [False, True, True]):
        assert_sound(aten.native_group_norm_backward.default, x + 1, x, mean, scale, weight, 4, 12, 6, 2, mask)


def test_batch_groups_channels_and_positions_may_be_sharded() -> None:
    x, weight = normal(4, 12, 4, 6), normal(12)
    assert_sound(aten.native_group_norm.default, x, weight, weight, 4, 12, 24, 3, 1e-5, shards="n g k s0 s1")


def test_single_precision_statistics_are_kept_wide() -> None:
    x, weight = (normal(4, 12, 6) + 2).bfloat16(), normal(12).bfloat16()
    assert_sound(aten.native_group_norm.default, x, weight, weight, 4, 12, 6, 3, 1e-5)


def test_gradients_of_weights_are_partial_over_batch_and_positions() -> None:
    x, weight = normal(4, 12, 6), normal(12)
    _, mean, scale = aten.native_group_norm(x, weight, weight, 4, 12, 6, 3, 1e-5)
    args = (x, x, mean, scale, weight, 4, 12, 6, 3, [True, True, True])
    _, rule = bound(aten.native_group_norm_backward.default, *args)
    specs = {
        name: [str(result_spec(rule, rule.indices(name), MeshShape.of({"x": 2}), result)) for result in range(3)]
        for name in ("n", "k", "s0")
    }
    assert specs["n"] == ["S(0)", "P(sum)", "P(sum)"]
    assert specs["k"] == ["S(1,f=3)", "S(0,f=3)", "S(0,f=3)"]
    assert specs["s0"] == ["S(2)", "P(sum)", "P(sum)"]


class ChannelsLast(nn.Module):
    """A group norm over channels that come last, and a loss whose gradient lies otherwise than fake tensors say."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 12)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.norm(x.transpose(1, 2)).transpose(1, 2), target)


def test_the_gradient_may_lie_in_memory_otherwise_than_captured() -> None:
    module = ChannelsLast().double()
    inputs = {"x": normal(4, 6, 12), "target": normal(4, 6, 12)}
    alone = copy.deepcopy(module)
    alone(**inputs).backward()
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"))
        module(**inputs).backward()
        found, expected = (
            {name: held_by_ranks(each.grad) for name, each in one.named_parameters()} for one in (module, alone)
        )
    assert relative_difference(found, expected) <= TOLERANCE


IMAGE_SHAPES = [(12, 6, 4, 2), (12, 6)]


def _channels() -> list[torch.Tensor]:
    return [normal(6), normal(6) + 1, normal(6) - 1, normal(6).abs() + 0.5]


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("training", [True, False])
def test_functional(shape: tuple[int, ...], training: bool) -> None:
    x = 2 * normal(*shape) + 1
    op = aten._native_batch_norm_legit_functional.default
    assert_sound(op, x, *_channels(), training, 0.1, 1e-5)
    assert_sound(op, x, None, None, *_channels()[2:], training, 0.3, 1e-5)


def test_training_shards_batch_channels_and_positions() -> None:
    args = (normal(12, 6, 4, 2), *_channels(), True, 0.1, 1e-5)
    assert_sound(aten._native_batch_norm_legit_functional.default, *args, shards="n c s0 s1")


def test_other_spellings() -> None:
    x = 2 * normal(12, 6, 4) + 1
    assert_sound(aten._native_batch_norm_legit.no_stats, x, *_channels()[:2], True, 0.1, 1e-5)
    assert_sound(aten._native_batch_norm_legit_no_training.default, x, *_channels(), 0.1, 1e-5)
    assert_sound(aten._batch_norm_with_update_functional.default, x, *_channels(), 0.1, 1e-5)
    assert_sound(aten._batch_norm_no_update.default, x, *_channels(), 0.1, 1e-5)


def test_single_precision_input_with_wide_statistics() -> None:
    x = (normal(12, 6, 4) + 1).bfloat16()
    assert_sound(
        aten._native_batch_norm_legit_functional.default, x, *(t.bfloat16() for t in _channels()), True, 0.1, 1e-5
    )


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
@pytest.mark.parametrize("mask", [[True, True, True], [False, True, True], [True, False, False]])
def test_backward_in_training(shape: tuple[int, ...], mask: list[bool]) -> None:
    x, gradient = 2 * normal(*shape) + 1, normal(*shape) + 1
    weight, _, mean, variance = _channels()
    saved = aten._native_batch_norm_legit_functional(x, *_channels(), True, 0.1, 1e-5)[1:3]
    args = (gradient, x, weight, mean, variance, *saved, True, 1e-5, mask)
    assert_sound(aten.native_batch_norm_backward.default, *args)
    reserve = torch.empty(0, dtype=torch.uint8)
    assert_sound(aten.batch_norm_backward.default, *args, reserve)


@pytest.mark.parametrize("shape", IMAGE_SHAPES)
def test_backward_in_inference(shape: tuple[int, ...]) -> None:
    weight, _, mean, variance = _channels()
    empty = normal(0)
    args = (normal(*shape), normal(*shape), weight, mean, variance, empty, empty, False, 1e-5, [True, True, True])
    assert_sound(aten.native_batch_norm_backward.default, *args)


def test_exchange_is_priced_in_training_only() -> None:
    op, x = aten._native_batch_norm_legit_functional.default, normal(12, 6, 4)
    for training, expected in ((True, (("gather_of_each", 3 * 8 * 6),)), (False, ())):
        _, rule = bound(op, x, *_channels(), training, 0.1, 1e-5)
        assert rule.factors[rule.indices("n")[0]].exchanges == expected


# Weight normalisation, and rows scaled down to a largest norm.


@pytest.mark.parametrize(("shape", "dim", "shards"), [((12, 6, 4), 0, "d1 d2 o"), ((4, 6, 12), 2, "d0 d1 o")])
def test_weight_norm(shape: tuple[int, ...], dim: int, shards: str) -> None:
    v = normal(*shape)
    g = normal(*(size if place == dim else 1 for place, size in enumerate(shape))).abs() + 1
    assert_sound(aten._weight_norm_interface.default, v, g, dim, shards=shards)
    _, lengths = aten._weight_norm_interface(v, g, dim)
    assert_sound(aten._weight_norm_interface_backward.default, v + 1, v, g, lengths, dim, shards=shards)


# Rows scaled down to a largest norm, against torch.


@pytest.mark.parametrize(("dim", "shards"), [(0, "d0"), (-2, "d1")])
def test_slices_along_one_dim(dim: int, shards: str) -> None:
    assert_sound(aten.renorm.default, normal(12, 6, 4), 2, dim, 1.0, shards=shards)


def test_rows_of_a_table() -> None:
    indices = torch.tensor([[0, 7, 7], [11, 3, 4]])
    assert_sound(aten.embedding_renorm.default, normal(12, 6), indices, 0.5, 2.0, shards="v")
