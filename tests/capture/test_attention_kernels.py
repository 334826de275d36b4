from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from autoshard.capture import attention_kernels
from autoshard.capture.attention import attention, operators
from tests.kernels.choice import AMPERE, CUDNN, EFFICIENT, FLASH, HOPPER, MATH
from tests.kernels.cuda import cuda_attention
from tests.patterns.ops.attention_calls import BACKWARD, FORWARD, backward_args, forward_args
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
                kept = FORWARD(*forward_args(tensors, True))
            for backward in (FLASH, EFFICIENT, CUDNN, MATH):
                with cuda_attention(any_type=True, order=(backward,)):
                    found = BACKWARD(*args[:4], *kept, *args[6:])
                for own, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


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
            found, logsumexp = FORWARD(*forward_args(tensors, True, scale=8**-0.5))
        assert logsumexp.dtype == torch.float32
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
