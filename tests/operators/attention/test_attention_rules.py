"""Rules of attention: the operator of captured graphs, and ATen's kernels by name, against torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Rule
from autoshard.patterns.strategy import result_spec
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from tests.operators.attention.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
from tests.patterns.ops.named_attention import attention_on_cpu
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.releases import skip
from tests.runtime.meshes import per_rank, simulated_mesh
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
def test_with_a_mask_that_is_broadcast(shape: tuple[int | None, ...]) -> None:
    tensors, mask = _tensors(6, 3), normal(*(6 if size is None else size for size in shape))
    assert_sound(FORWARD, *forward_args(tensors, mask=mask), shards="b h r s")
    for wanted in (True, False):
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
    try:
        _, rule = _rule(op, query, query, query, query, bias, mask, *kept[:4], 8, 8, 0.0, False, *state)
    except NotImplementedError:
        skip(f"the shapes of {op.name()}")
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


# Flash and memory-efficient attention by name: the references agree with torch, and every strategy with them.

FLASH, FLASH_BACKWARD = aten._flash_attention_forward.default, aten._flash_attention_backward.default
EFFICIENT, EFFICIENT_BACKWARD = aten._efficient_attention_forward.default, aten._efficient_attention_backward.default
ENDS = torch.tensor([0, 3, 3, 8], dtype=torch.int32)  # the second sample is empty
STATE = torch.zeros((), dtype=torch.int64)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with attention_on_cpu():
        yield


def _one_length(heads: int, groups: int, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, length, heads, 4), normal(2, length, groups, 4) + 0.1, normal(2, length, groups, 6)


def _packed(heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    return normal(8, heads, 4), normal(8, groups, 4) + 0.1, normal(8, groups, 6)


def _flash(inputs: tuple[Tensor, ...], ends: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    out, logarithms, *_ = FLASH(*inputs, ends, ends, 8, 8, 0.0, causal, False)
    return out, logarithms


def _flash_gradient(inputs: tuple[Tensor, ...], ends: Tensor | None, causal: bool) -> tuple[Any, ...]:
    """Arguments of the backward kernel."""
    out, logarithms = _flash(inputs, ends, causal)
    bounds = torch.zeros(0, dtype=torch.int32) if ends is None else ends
    return out.flip(0), *inputs, out, logarithms, bounds, bounds, 8, 8, 0.0, causal, STATE, STATE


@pytest.mark.parametrize("causal", [False, True])
def test_the_references_are_torchs_attention(causal: bool) -> None:
    leaves = [one.requires_grad_() for one in _one_length(4, 2)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    inputs = tuple(one.detach() for one in leaves)
    out, _ = _flash(inputs, None, causal)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, leaves, out.flip(0))
    for ours, theirs in zip(FLASH_BACKWARD(*_flash_gradient(inputs, None, causal)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    same = (inputs[0], *(one.repeat_interleave(2, 2) for one in inputs[1:]))
    result = EFFICIENT(*same, None, None, None, None, None, 0.0, int(causal), True)
    torch.testing.assert_close(result[0], expected)
    made = EFFICIENT_BACKWARD(*_efficient_gradient(same, None, result, int(causal)))
    torch.testing.assert_close(made[0], wanted[0])
    torch.testing.assert_close(made[1].unflatten(2, (2, 2)).sum(3), wanted[1])


def test_packed_samples_are_samples_of_their_own() -> None:
    inputs = _packed(4, 2)
    out, logarithms = _flash(inputs, ENDS, True)
    last, of_last = _flash(tuple(one[None, 3:] for one in inputs), None, True)
    torch.testing.assert_close(out[3:], last[0])
    torch.testing.assert_close(logarithms[:, 3:], of_last[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "groups", "shards"), [(4, 4, "b h"), (8, 4, "b h r"), (6, 1, "b r")])
def test_flash(heads: int, groups: int, shards: str, causal: bool) -> None:
    inputs = _one_length(heads, groups)
    assert_sound(FLASH, *inputs, None, None, 5, 5, 0.0, causal, False, shards=shards)
    assert_sound(FLASH_BACKWARD, *_flash_gradient(inputs, None, causal), shards=shards)


@pytest.mark.parametrize(("heads", "groups", "shards"), [(4, 4, "h"), (8, 4, "h r")])
def test_flash_on_packed_samples(heads: int, groups: int, shards: str) -> None:
    inputs = _packed(heads, groups)
    assert_sound(FLASH, *inputs, ENDS, ENDS, 8, 8, 0.0, True, False, shards=shards)
    assert_sound(FLASH_BACKWARD, *_flash_gradient(inputs, ENDS, True), shards=shards)


def _efficient_gradient(
    inputs: tuple[Tensor, ...], bias: Tensor | None, result: tuple[Any, ...], kind: int, ends: Tensor | None = None
) -> tuple[Any, ...]:
    """Arguments of the backward kernel."""
    out, logarithms = result[:2]
    given = bias is not None
    return out.flip(0), *inputs, bias, out, ends, ends, 8, 8, logarithms, 0.0, STATE, STATE, kind, given


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("shape", [None, (2, 4, 5, 5), (1, 4, 5, 5), (2, 1, 5, 5)])
def test_efficient(kind: int, shape: tuple[int, ...] | None) -> None:
    inputs, bias = _one_length(4, 4), None if shape is None else normal(*shape)
    args = (*inputs, bias, None, None, None, None, 0.0, kind, True)
    assert_sound(EFFICIENT, *args, shards="b h")
    assert_sound(EFFICIENT_BACKWARD, *_efficient_gradient(inputs, bias, EFFICIENT(*args), kind), shards="b h")


def test_efficient_on_packed_samples() -> None:
    inputs = tuple(one[None] for one in _packed(4, 4))
    args = (*inputs, None, ENDS, ENDS, 8, 8, 0.0, 1, True)
    assert_sound(EFFICIENT, *args, shards="h")
    assert_sound(EFFICIENT_BACKWARD, *_efficient_gradient(inputs, None, EFFICIENT(*args), 1, ENDS), shards="h")


def test_what_has_no_rule() -> None:
    """Dropout, whose numbers are those of one device; slopes of positions; key heads shared in the efficient kernel."""
    inputs = _one_length(4, 4)
    results = FLASH(*inputs, None, None, 5, 5, 0.0, False, False)
    for dropout, options in ((0.1, {}), (0.0, {"alibi_slopes": normal(4).float()})):
        args = (*inputs, None, None, 5, 5, dropout, False, False)
        assert rule_for(call_of(FLASH, args, options, results)) is None
    grouped = _one_length(4, 2)
    args = (*grouped, None, None, None, None, None, 0.0, 0, True)
    assert rule_for(call_of(EFFICIENT, args, {}, results)) is None


class Packed(nn.Module):
    """Self-attention on samples that lie behind each other, by the kernel's name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        query, key, value = self.inner(x).view(len(x), 3, 4, 4).unbind(1)
        mixed = aten._flash_attention_forward(query, key, value, ends, ends, 8, 8, 0.0, True, False)[0]
        return self.outer(autoshard.shard(mixed, Shard(1)).flatten(1)).square().mean()


def test_a_model_that_packs_samples_trains_with_its_heads_sharded() -> None:
    module, inputs = Packed().double(), (normal(8, 16), ENDS)
    alone = copy.deepcopy(module)
    expected = alone(*inputs)
    expected.backward()
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, inputs, cluster=fast_links())
        loss = module(*inputs)
        loss.backward()
        for value in per_rank(loss, mesh).values():
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        for name, parameter in alone.named_parameters():
            for value in per_rank(gather_full_tensor(module.get_parameter(name).grad), mesh).values():
                torch.testing.assert_close(value, parameter.grad, rtol=1e-9, atol=1e-12)
    graphs = next(iter(module._autoshard_runtime.programs.table.values())).program.halves.graphs
    (call,) = graphs[0].find_nodes(op="call_function", target=FLASH)
    assert call.meta["val"][0].shape == (8, 2, 4)  # two of four heads
