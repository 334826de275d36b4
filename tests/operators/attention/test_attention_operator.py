from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autoshard.capture import capture
from autoshard.operators.attention.attention_operator import attention, operators
from tests.capture.interpret import run_joint

DOUBLE = torch.float64


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DOUBLE)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "plain": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "more keys": ((2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8)),
    "fewer keys": ((2, 4, 6, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
    "narrow values": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5)),
    "odd heads": ((2, 4, 6, 5), (2, 4, 6, 5), (2, 4, 6, 5)),
    "no heads": ((3, 6, 8), (3, 6, 8), (3, 6, 8)),
    "one sequence": ((6, 8), (6, 8), (6, 8)),
    "many samples": ((2, 3, 4, 6, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    "broadcast samples": ((2, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
    "broadcast heads": ((2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
}


def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> None:
    """Compare results and gradients of the operator with those of torch."""
    leaves = [query, key, value]
    if isinstance(options.get("attn_mask"), torch.Tensor) and options["attn_mask"].requires_grad:
        leaves.append(options["attn_mask"])
    leaves = [leaf.requires_grad_() for leaf in leaves]
    expected = scaled_dot_product_attention(query, key, value, **options)
    found = attention(query, key, value, **options, dtype=query.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradient = normal(*expected.shape)
    for own, other in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("causal", [True, False])
def test_it_is_the_attention_of_torch(shapes: tuple[tuple[int, ...], ...], causal: bool) -> None:
    query, key, value = (normal(*shape) for shape in shapes)
    both(query, key, value, is_causal=causal)
    both(query, key, value, is_causal=causal, scale=0.3)


@pytest.mark.parametrize("shape", [(2, 4, 6, 10), (2, 1, 6, 10), (1, 1, 1, 10), (6, 10), (1, 10), (4, 6, 10)])
def test_with_a_mask(shape: tuple[int, ...]) -> None:
    query, key, value = normal(2, 4, 6, 8), normal(2, 4, 10, 8), normal(2, 4, 10, 8)
    both(query, key, value, attn_mask=normal(*shape))
    both(query, key, value, attn_mask=normal(*shape).requires_grad_())
    both(query, key, value, attn_mask=normal(*shape) > 0)


def test_queries_that_attend_to_nothing() -> None:
    """Their result is zero, and so are their gradients."""
    query = normal(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    both(query, normal(1, 2, 4, 8), normal(1, 2, 4, 8), attn_mask=mask)
    both(normal(1, 2, 4, 8), normal(1, 2, 4, 8), normal(1, 2, 4, 5), attn_mask=mask)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("width", [8, 5])
def test_heads_that_share_keys(groups: int, width: int) -> None:
    query, key, value = normal(2, 4, 6, 8), normal(2, groups, 6, 8), normal(2, groups, 6, width)
    both(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("window", [0, 3, 20])
@pytest.mark.parametrize("start", [0, 2, 6, 11])
def test_a_stretch_of_causal_queries(start: int, window: int) -> None:
    """Its queries stand behind `start` others; those behind the last key are padding, and attend as they can."""
    query, key, value = (normal(2, 4, 12, 8).requires_grad_() for _ in range(3))
    stretch = query[:, :, start : start + 4]
    position = torch.arange(12).unsqueeze(1)
    mask = (torch.arange(12) <= position) & (torch.arange(12) > position - (window or 12))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, :, start : start + 4]
    found = operators.attention(stretch, key, value, None, torch.tensor(start), True, window, 8**-0.5)[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradient = normal(*expected.shape)
    leaves = [query, key, value]
    for own, other in zip(
        torch.autograd.grad(found, leaves, gradient), torch.autograd.grad(expected, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_it_tells_without_numbers_is_what_it_gives(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, heads, 6, 8).to(dtype) for heads in (4, 2, 2))
    args = (None, None, True, 0, 0.3)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.attention.default, (query, key, value, *args), test_utils=checks)
    kept = operators.attention(query, key, value, *args)
    backward = (query, query, key, value, *kept[:2], *args, False)
    torch.library.opcheck(operators.attention_backward.default, backward, test_utils=checks)
    fakes = operators.attention(*(each.to("meta") for each in (query, key, value)), *args)
    for result, fake in zip(kept, fakes, strict=True):
        assert result.stride() == fake.stride()


class Attending(nn.Module):
    """Attention of a tensor with itself, under a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
        return scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()


def test_a_graph_has_one_operator_for_it() -> None:
    module, x = Attending().double(), normal(2, 6, 8)
    graph = capture(module, (x,), {})
    targets = [str(node.target) for node in graph.graph_module.graph.nodes]
    assert targets.count("autoshard.attention.default") == 1
    assert targets.count("autoshard.attention_backward.default") == 1
    loss = module(x)
    loss.backward()
    run = run_joint(graph, module, (x,))
    torch.testing.assert_close(run.output, loss)
    torch.testing.assert_close(run.gradients["into.weight"], module.into.weight.grad)


def test_autocast_decides_in_what_precision() -> None:
    module, x = Attending(), torch.randn(2, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(module, (x,), {})
    (node,) = graph.graph_module.graph.find_nodes(op="call_function", target=operators.attention.default)
    assert node.args[0].meta["val"].dtype == torch.bfloat16


class Own(torch.autograd.Function):
    """Attention with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return scaled_dot_product_attention(x, x, x, is_causal=True)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return scaled_dot_product_attention(gradient, x, x)


class Within(nn.Module):
    """A function that attends."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Own.apply(self.into(x))
        return result.square().mean()


def test_attention_in_a_function_with_its_own_backward() -> None:
    """Such code is traced without being exported, and its kernels would be those of the machine that traces it."""
    graph = capture(Within(), (torch.randn(2, 3, 6, 8),), {})
    targets = [str(node.target) for node in graph.graph_module.graph.nodes]
    assert targets.count("autoshard.attention.default") == 2
    assert not any("scaled_dot_product" in target for target in targets)
