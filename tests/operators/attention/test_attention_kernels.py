from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from autoshard.operators.attention import attention_kernels
from autoshard.operators.attention.attention_operator import attention, operators
from tests.kernels.choice import AMPERE, CUDNN, EFFICIENT, FLASH, HOPPER, MATH
from tests.kernels.cuda import cuda_attention
from tests.operators.attention.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
from tests.patterns.ops.soundness import assert_sound, normal

ORDERS = {"ampere": AMPERE, "hopper": HOPPER, "flash": (FLASH, MATH), "efficient": (EFFICIENT, MATH), "math": (MATH,)}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequence[SDPBackend]]:
    """Tensors of the CPU count as a GPU's, whose kernels are tried in some order."""
    monkeypatch.setattr(attention_kernels, "_KERNELS", {})
    with cuda_attention(any_type=True, order=request.param):
        yield request.param


def gradients(result: torch.Tensor, leaves: Sequence[torch.Tensor], gradient: torch.Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(result, leaves, gradient)


def spelt_out(*tensors: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Attention in matrix products, which takes numbers for a mask."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*tensors, mask, **options)[0]
    return result


def check(shapes: Sequence[tuple[int, ...]], mask: torch.Tensor | None = None, **options: Any) -> None:
    """Compare results and gradients under the kernels of a GPU with attention in matrix products."""
    leaves = [normal(*shape).requires_grad_() for shape in shapes]
    if mask is not None and mask.requires_grad:
        leaves.append(mask)
    found = attention(*leaves[:3], mask, **options, dtype=torch.float64)
    gradient = normal(*found.shape) - 1
    of_found = gradients(found, leaves, gradient)
    expected = spelt_out(*leaves[:3], mask=mask, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for own, other in zip(of_found, gradients(expected, leaves, gradient), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [8, 5])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (40, 40), (6, 10), (10, 6)])
@pytest.mark.parametrize("causal", [True, False])
def test_plain(order: Any, width: int, queries: int, keys: int, causal: bool) -> None:
    check([(2, 4, queries, width), (2, 4, keys, width), (2, 4, keys, width)], is_causal=causal)
    check([(2, 4, queries, width), (2, 4, keys, width), (2, 4, keys, width)], is_causal=causal, scale=0.3)


def test_values_of_another_width(order: Any) -> None:
    check([(2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 16)])
    check([(2, 4, 6, 16), (2, 4, 6, 16), (2, 4, 6, 8)], is_causal=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_that_share_keys(order: Any, groups: int) -> None:
    check([(2, 4, 6, 8), (2, groups, 6, 8), (2, groups, 6, 8)], is_causal=True, enable_gqa=True)
    check([(2, 4, 6, 8), (2, groups, 6, 8), (2, groups, 6, 8)], normal(6, 6) > 0, enable_gqa=True)


@pytest.mark.parametrize("shape", [(2, 4, 6, 10), (2, 1, 6, 10), (1, 1, 1, 10), (6, 10), (2, 4, 6, 1)])
def test_masks(order: Any, shape: tuple[int, ...]) -> None:
    shapes = [(2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8)]
    check(shapes, normal(*shape))
    check(shapes, normal(*shape).requires_grad_())
    if shape[-1] > 1:
        check(shapes, normal(*shape) > -1)


@pytest.mark.parametrize("start", [0, 4, 11])
@pytest.mark.parametrize("window", [0, 3])
def test_a_stretch_of_causal_queries(order: Any, start: int, window: int) -> None:
    query, key, value = (normal(2, 4, 12, 8).requires_grad_() for _ in range(3))
    position = torch.arange(12).unsqueeze(1)
    mask = (torch.arange(12) <= position) & (torch.arange(12) > position - (window or 12))
    stretch = query[:, :, start : start + 4]
    expected = spelt_out(query, key, value, mask=mask)[:, :, start : start + 4]
    found = operators.attention(stretch, key, value, None, torch.tensor(start), True, window, 8**-0.5)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradient = normal(*expected.shape)
    leaves = [query, key, value]
    for own, other in zip(gradients(found, leaves, gradient), gradients(expected, leaves, gradient), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_the_two_halves_may_take_different_kernels() -> None:
    """Each keeps what the other needs."""
    tensors = [normal(2, 4, 40, 8) for _ in range(3)]
    args = backward_args(normal(2, 4, 40, 8), tensors, True)
    expected = BACKWARD(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernels, "_KERNELS", {})
        for forward in (FLASH, EFFICIENT, CUDNN, MATH):
            with cuda_attention(any_type=True, order=(forward,)):
                kept = FORWARD(*forward_args(tensors, True))[:2]
            for backward in (FLASH, EFFICIENT, CUDNN, MATH):
                with cuda_attention(any_type=True, order=(backward,)):
                    found = BACKWARD(*args[:4], *kept, *args[6:])
                for own, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


OF_THEIR_OWN = [order for order in ORDERS if order != "flash"]  # Ampere takes that kernel for what the rule is asked


@pytest.mark.parametrize("order", [ORDERS[name] for name in OF_THEIR_OWN], ids=OF_THEIR_OWN, indirect=True)
@pytest.mark.parametrize("causal", [True, False])
def test_every_strategy_of_the_rule(order: Any, causal: bool) -> None:
    """Shards, stretches of queries and rings, under the kernels of a GPU."""
    tensors = normal(4, 4, 8, 8), normal(4, 2, 8, 8), normal(4, 2, 8, 8) + 1
    assert_sound(FORWARD, *forward_args(tensors, causal))
    assert_sound(BACKWARD, *backward_args(normal(4, 4, 8, 8) - 1, tensors, causal))


def test_halves_of_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own types, within what these can tell apart."""
    monkeypatch.setattr(attention_kernels, "_KERNELS", {})
    tensors = [normal(2, 4, 32, 8).bfloat16() for _ in range(3)]
    expected = scaled_dot_product_attention(*(each.float() for each in tensors), is_causal=True)
    for order in ORDERS.values():
        with cuda_attention(order=order):
            found, logsumexp, _ = FORWARD(*forward_args(tensors, True, scale=8**-0.5))
        assert logsumexp.dtype == torch.float32
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


DROPPED = 0.25  # a multiple of 1/16, as cuDNN asks for

FORMS_OF_DROPOUT: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (4, 40, {}),
    "causal": (4, 40, {"is_causal": True}),
    "window": (4, 40, {"is_causal": True, "window": 7}),
    "grouped": (2, 40, {"is_causal": True, "enable_gqa": True}),
    "more keys": (4, 48, {}),
    "truth values": (4, 48, {"attn_mask": normal(2, 1, 40, 48) > -1}),
    "numbers": (4, 48, {"attn_mask": normal(40, 48)}),
    "learnt numbers": (4, 48, {"attn_mask": normal(1, 4, 40, 48).requires_grad_()}),
}


def weights_of(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """The weights of attention before any is dropped."""
    key = key.repeat_interleave(4 // key.shape[1], 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        distance = torch.arange(40).unsqueeze(1) - torch.arange(key.shape[2])
        mask = (distance >= 0) & (distance < options.get("window", len(distance)))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def kept_by(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Which weights a call of this seed keeps: its results where the values are those of one key after another."""
    parts = []
    with torch.no_grad():
        for values in torch.eye(key.shape[2], dtype=torch.float64).split(8, 1):
            torch.manual_seed(5)
            value = values.expand(2, key.shape[1], -1, -1)
            parts.append(attention(query, key, value, dropout_p=DROPPED, **options, dtype=torch.float64))
    return torch.cat(parts, -1) != 0


@pytest.mark.parametrize("form", FORMS_OF_DROPOUT)
def test_dropout(order: Any, form: str) -> None:
    """Gradients are those of the formula with the weights that forward dropped; generators stay as they are."""
    groups, keys, options = FORMS_OF_DROPOUT[form]
    leaves = [normal(2, *shape).requires_grad_() for shape in ((4, 40, 8), (groups, keys, 8), (groups, keys, 8))]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        leaves.append(mask)
    kept = kept_by(*leaves[:2], options)
    weights = weights_of(*leaves[:2], options)
    possible = weights > 0
    assert not kept[~possible].any()
    assert abs(kept[possible].double().mean() - (1 - DROPPED)) < 0.03
    torch.manual_seed(5)
    found = attention(*leaves[:3], dropout_p=DROPPED, **options, dtype=torch.float64)
    gradient = normal(*found.shape) - 1
    before = torch.get_rng_state()
    of_found = gradients(found, leaves, gradient)
    assert torch.equal(torch.get_rng_state(), before)
    values = leaves[2].repeat_interleave(4 // groups, 1)
    expected = (weights * kept / (1 - DROPPED)) @ values
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for own, other in zip(of_found, gradients(expected, leaves, gradient), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_forward_leaves_the_generator_as_it_is(order: Any) -> None:
    query = normal(2, 4, 40, 8)
    before = torch.get_rng_state()
    FORWARD(*forward_args((query, query, query), True), DROPPED, torch.tensor(7))
    assert torch.equal(torch.get_rng_state(), before)


def test_backward_takes_the_kernel_that_dropped() -> None:
    """Whatever is chosen when it runs: kernels may be switched off between the halves."""
    leaves = [normal(2, 4, 40, 8).requires_grad_() for _ in range(3)]
    gradient = normal(2, 4, 40, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernels, "_KERNELS", {})
        for forward in (FLASH, EFFICIENT, CUDNN, MATH):
            with cuda_attention(any_type=True, order=(forward,)):
                kept = kept_by(*leaves[:2], {})
                torch.manual_seed(5)
                found = attention(*leaves, dropout_p=DROPPED, dtype=torch.float64)
            expected = (weights_of(*leaves[:2], {}) * kept / (1 - DROPPED)) @ leaves[2]
            with cuda_attention(any_type=True, order=(MATH,)):
                of_found = gradients(found, leaves, gradient)
            for own, other in zip(of_found, gradients(expected, leaves, gradient), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


def test_two_seeds_drop_other_weights(order: Any) -> None:
    query = normal(2, 4, 40, 8)
    found = [FORWARD(*forward_args((query,) * 3), DROPPED, torch.tensor(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("probability", [1 - 1e-9, 1.0])
def test_everything_is_dropped(order: Any, probability: float) -> None:
    query = normal(2, 4, 40, 8).requires_grad_()
    found = attention(query, query, query, dropout_p=probability, dtype=torch.float64)
    assert not found.any()
    assert not gradients(found, [query], found.detach())[0].any()
