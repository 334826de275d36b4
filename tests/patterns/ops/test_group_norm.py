from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks, relative_difference


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
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), effort="fast")
        module(**inputs).backward()
        found, expected = (
            {name: held_by_ranks(each.grad) for name, each in one.named_parameters()} for one in (module, alone)
        )
    assert relative_difference(found, expected) <= TOLERANCE
