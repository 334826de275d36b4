from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import result_spec
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

HEADS = [(6, 6), (6, 3), (12, 2)]
MASKS = [(4, None, 6, 6), (4, 1, 6, 6), (1, 1, 1, 6), (1, None, 1, 6), (6, 6)]


def _tensors(heads: int, groups: int) -> list[torch.Tensor]:
    return [normal(4, heads, 6, 8), normal(4, groups, 6, 8), normal(4, groups, 6, 8) + 1]


@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_of_captured_graphs(heads: int, groups: int, causal: bool) -> None:
    shards = "b h s" + (" r" if heads != groups else "")
    tensors = _tensors(heads, groups)
    assert_sound(FORWARD, *forward_args(tensors, causal), shards=shards)
    assert_sound(BACKWARD, *backward_args(normal(4, heads, 6, 8) - 1, tensors, causal), shards=shards)


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("wanted", [True, False])
def test_with_a_mask_that_is_broadcast(shape: tuple[int | None, ...], wanted: bool) -> None:
    tensors, mask = _tensors(6, 3), normal(*(6 if size is None else size for size in shape))
    assert_sound(FORWARD, *forward_args(tensors, mask=mask), shards="b h r s")
    assert_sound(BACKWARD, *backward_args(normal(4, 6, 6, 8), tensors, mask=mask, mask_gradient=wanted))
    assert_sound(FORWARD, *forward_args(tensors, mask=mask > 0), shards="b h r s")
    assert_sound(BACKWARD, *backward_args(normal(4, 6, 6, 8), tensors, mask=mask > 0))


@pytest.mark.parametrize(("queries", "keys"), [(12, 8), (4, 24), (12, 12)])
@pytest.mark.parametrize("window", [0, 3])
def test_causal_with_other_numbers_of_keys_than_queries(queries: int, keys: int, window: int) -> None:
    tensors = normal(2, 2, queries, 8), normal(2, 2, keys, 8), normal(2, 2, keys, 8) + 1
    assert_sound(FORWARD, *forward_args(tensors, True, window=window), shards="b h s")
    assert_sound(BACKWARD, *backward_args(tensors[0] + 1, tensors, True, window=window), shards="b h s")


def test_a_stretch_of_causal_queries_is_contiguous() -> None:
    _, rule = bound(FORWARD, *forward_args(_tensors(6, 6), True))
    assert [factor.contiguous for factor in rule.factors if factor.name == "s"] == [True]


def test_gradients_of_keys_are_partial_over_queries() -> None:
    tensors = _tensors(6, 6)
    _, rule = bound(BACKWARD, *backward_args(tensors[0], tensors))
    mesh = MeshShape.of({"x": 2})
    specs = [str(result_spec(rule, rule.indices("s"), mesh, result)) for result in range(3)]
    assert specs == ["S(2)", "P(sum)", "P(sum)"]


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_of_the_cpu_by_name(causal: bool) -> None:
    tensors, shards = _tensors(6, 3), "b h r" if causal else "b h r s"
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    assert_sound(forward.default, *tensors, 0.0, causal, shards=shards)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert_sound(backward, normal(4, 6, 6, 8), *tensors, *forward(*tensors, 0.0, causal), 0.0, causal, shards=shards)


def _on_accelerator(*shape: int) -> torch.Tensor:
    """Kernels of accelerators tell their shapes on the meta device."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def _rule(op: Any, *args: Any) -> tuple[Any, Rule | None]:
    results = op(*args)
    return results, rule_for(call_of(op, args, {}, results))


def _shardable(rule: Rule | None) -> str:
    assert rule is not None
    return " ".join(sorted(factor.name for factor in rule.factors if factor.shardable))


@pytest.mark.parametrize(("causal", "shards"), [(True, "b h r"), (False, "b h r s")])
def test_flash_and_cudnn(causal: bool, shards: str) -> None:
    query, key = _on_accelerator(2, 12, 8, 64), _on_accelerator(2, 4, 16, 64)
    flash, rule = _rule(aten._scaled_dot_product_flash_attention.default, query, key, key, 0.0, causal)
    assert _shardable(rule) == shards
    op = aten._scaled_dot_product_flash_attention_backward.default
    _, rule = _rule(op, query, query, key, key, *flash[:4], 8, 16, 0.0, causal, flash[6], flash[7])
    assert _shardable(rule) == shards
    cudnn, rule = _rule(aten._scaled_dot_product_cudnn_attention.default, query, key, key, None, True, 0.0, causal)
    assert _shardable(rule) == shards
    op = aten._scaled_dot_product_cudnn_attention_backward.default
    args = (query, query, key, key, *cudnn[:2], *cudnn[6:8], None, *cudnn[2:4], 8, 16, 0.0, causal)
    assert _shardable(_rule(op, *args)[1]) == shards


@pytest.mark.parametrize("biased", [True, False])
def test_efficient_keeps_queries_whole(biased: bool) -> None:
    query = _on_accelerator(2, 12, 32, 64)
    bias = _on_accelerator(2, 1, 32, 32) if biased else None
    kept, rule = _rule(aten._scaled_dot_product_efficient_attention.default, query, query, query, bias, True)
    assert _shardable(rule) == "b h"
    op = aten._scaled_dot_product_efficient_attention_backward.default
    _, rule = _rule(op, query, query, query, query, bias, *kept, 0.0, [True, True, True, biased])
    assert _shardable(rule) == "b h"


def test_overrideable() -> None:
    query, bias = _on_accelerator(2, 12, 8, 64), _on_accelerator(1, 12, 8, 8)
    op = aten._scaled_dot_product_fused_attention_overrideable.default
    kept, rule = _rule(op, query, query, query, bias)
    assert _shardable(rule) == "b h s"
    op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
    mask, state = [True, True, True, True], (kept[6], kept[7])
    _, rule = _rule(op, query, query, query, query, bias, mask, *kept[:4], 8, 8, 0.0, False, *state)
    assert rule is not None
    mesh = MeshShape.of({"x": 2})
    specs = [str(result_spec(rule, rule.indices("b"), mesh, result)) for result in range(4)]
    assert specs == ["S(0)", "S(0)", "S(0)", "P(sum)"]


def test_no_rule_with_dropout_inside() -> None:
    query = _on_accelerator(2, 12, 8, 64)
    assert _rule(aten._scaled_dot_product_flash_attention.default, query, query, query, 0.1)[1] is None


class Causal(nn.Module):
    """Causal attention of a few heads, with queries pinned by position."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = autoshard.shard(self.query(x), Shard(2)), self.key(x)
        result = functional.scaled_dot_product_attention(query, key, x, is_causal=True)
        return autoshard.shard(result, Shard(2)).square().mean()


def test_causal_queries_sharded_by_position_train_as_on_one_device() -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {"x": torch.randn(1, 3, 12, 8)}
    torch.manual_seed(1)
    reference = train(Causal(), inputs)
    torch.manual_seed(1)
    module = Causal()
    with simulated_mesh(dp=4) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
