"""The references against attention written out, in float64: forward, and backward from what forward kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck

from tests.kernels.cuda import cuda_attention

aten = torch.ops.aten
TOLERANCE = 1e-9
HEADS = [(4, 4), (4, 2), (3, 1)]
Kernel = Callable[..., tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with cuda_attention(any_type=True):
        yield


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def tensors(heads: int, groups: int, queries: int = 7, keys: int = 7, head: int = 8) -> list[Tensor]:
    return [numbers(2, heads, queries, head), numbers(2, groups, keys, head), numbers(2, groups, keys, head)]


def assert_equal(ours: Any, theirs: Any, inputs: list[Tensor]) -> None:
    """Results, and gradients of a weighted sum of them, agree to `TOLERANCE` of the largest number, or of one."""
    weight = torch.randn_like(theirs)
    pairs = [(ours, theirs)]
    pairs += zip(*(grad((result * weight).sum(), inputs) for result in (ours, theirs)), strict=True)
    for mine, right in pairs:
        assert mine.shape == right.shape
        assert (mine - right).abs().max() <= TOLERANCE * right.abs().max().clamp(min=1.0)


def written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return aten._scaled_dot_product_attention_math(query, key, value, mask, enable_gqa=grouped, **options)[0]


def logarithms(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query @ keys.transpose(-2, -1) * scale).masked_fill(~mask, -torch.inf).logsumexp(-1)


def efficient(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, **options)


def cudnn(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[Any, ...]:
    return aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, **options)


flash = aten._scaled_dot_product_flash_attention


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "groups"), HEADS)
@pytest.mark.parametrize("kernel", [flash, efficient, cudnn], ids=["flash", "efficient", "cudnn"])
def test_square(kernel: Kernel, heads: int, groups: int, is_causal: bool, scale: float | None) -> None:
    inputs = tensors(heads, heads if kernel is efficient else groups)
    ours = kernel(*inputs, is_causal=is_causal, scale=scale)
    assert_equal(ours[0], written_out(*inputs, is_causal=is_causal, scale=scale), inputs)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("kernel", [flash, efficient, cudnn], ids=["flash", "efficient", "cudnn"])
def test_more_and_fewer_keys_than_queries(kernel: Kernel, queries: int, keys: int) -> None:
    inputs = tensors(4, 4, queries, keys)
    assert_equal(kernel(*inputs)[0], written_out(*inputs), inputs)


@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
@pytest.mark.parametrize("kernel", [efficient, cudnn], ids=["efficient", "cudnn"])
def test_causal_masks_begin_with_the_first_key(kernel: Kernel, queries: int, keys: int) -> None:
    inputs = tensors(4, 4, queries, keys)
    assert_equal(kernel(*inputs, is_causal=True)[0], written_out(*inputs, is_causal=True), inputs)


@pytest.mark.parametrize("kernel", [efficient, cudnn], ids=["efficient", "cudnn"])
def test_values_of_another_head_size(kernel: Kernel) -> None:
    inputs = tensors(4, 4)
    inputs[2] = numbers(2, 4, 7, 16)
    assert_equal(kernel(*inputs, is_causal=True)[0], written_out(*inputs, is_causal=True), inputs)


def aligned(mask: Tensor) -> Tensor:
    """The same numbers, rows of which begin at multiples of 16 elements."""
    return torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 16))[..., : mask.shape[-1]]


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (1, 4, 7, 9)])
def test_bias_of_efficient_with_its_gradient(shape: tuple[int, ...]) -> None:
    inputs, bias = tensors(4, 4, 7, 9), numbers(*shape)
    ours = efficient(*inputs, aligned(bias).expand(2, 4, 7, 9))[0]
    assert_equal(ours, written_out(*inputs, bias), [*inputs, bias])


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (7, 9), (1, 7, 9), (2, 1, 7, 9)])
def test_bias_of_cudnn(shape: tuple[int, ...]) -> None:
    inputs, bias = tensors(4, 2, 7, 9), numbers(*shape).detach()
    assert_equal(cudnn(*inputs, bias)[0], written_out(*inputs, bias), inputs)


def visible(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Keys that queries see, position by position, where the last query is level with the last key."""
    rows = []
    for query in range(queries):
        level = query + keys - queries
        rows.append([(left < 0 or key >= level - left) and (right < 0 or key <= level + right) for key in range(keys)])
    return torch.tensor(rows)


def of_positions(query: Tensor, key: Tensor, value: Tensor, causal: bool, **options: Any) -> tuple[Any, ...]:
    """`_flash_attention_forward` of `[b, h, s, d]`: `[b, s, h, d]` is what it takes."""
    turned = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    sizes = (query.shape[2], key.shape[2])
    return aten._flash_attention_forward(*turned, None, None, *sizes, 0.0, causal, False, **options)


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (2, 0), (0, 0), (3, 2), (-1, 1), (2, -1), (50, 50)])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9)])
@pytest.mark.parametrize(("heads", "groups"), HEADS[:2])
def test_windows(heads: int, groups: int, queries: int, keys: int, left: int, right: int) -> None:
    inputs = tensors(heads, groups, queries, keys)
    mask = visible(queries, keys, left, right)
    result, statistics, *_ = of_positions(*inputs, False, window_size_left=left, window_size_right=right, scale=0.4)
    assert_equal(result.transpose(1, 2), written_out(*inputs, mask, scale=0.4), inputs)
    torch.testing.assert_close(statistics, logarithms(*inputs[:2], mask, 0.4), rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (1, 6)])
def test_causal_flash_attention_ends_with_the_last_key(queries: int, keys: int) -> None:
    inputs = tensors(4, 2, queries, keys)
    result = of_positions(*inputs, True)[0].transpose(1, 2)
    assert_equal(result, written_out(*inputs, visible(queries, keys, -1, 0)), inputs)


def test_queries_of_flash_that_see_no_key() -> None:
    inputs = tensors(4, 2, 9, 5)
    result, statistics, *_ = of_positions(*inputs, True)
    assert not result[:, :4].any()
    assert (statistics[..., :4] == torch.inf).all()
    assert_equal(result.transpose(1, 2), written_out(*inputs, visible(9, 5, -1, 0)), inputs)


def hidden_rows() -> Tensor:
    bias = torch.zeros(7, 9, dtype=torch.float64)
    bias[[0, 3]] = -torch.inf
    return bias


def test_queries_of_efficient_that_see_no_key() -> None:
    inputs = tensors(4, 4, 7, 9)
    result, statistics, *_ = efficient(*inputs, aligned(hidden_rows()).expand(2, 4, 7, 9))
    assert not result[:, :, [0, 3]].any()
    assert not statistics[:, :, [0, 3]].any()
    assert_equal(result, written_out(*inputs, hidden_rows() == 0), inputs)


def test_nothing_is_promised_of_queries_of_cudnn_that_see_no_key() -> None:
    result = cudnn(*tensors(4, 4, 7, 9), hidden_rows())[0]
    assert result[:, :, [0, 3]].isnan().all()
    assert not result[:, :, [1, 2, 4, 5, 6]].isnan().any()


def test_statistics_of_efficient_fill_whole_blocks_of_rows() -> None:
    query, key, value = tensors(4, 4, 40, 8)
    kept = efficient(query, key, value)[1]
    assert kept.shape == (2, 4, 64)
    assert (kept[..., 40:] == torch.inf).all()
    right = logarithms(query, key, torch.ones(40, 8, dtype=torch.bool), 8**-0.5)
    torch.testing.assert_close(kept[..., :40], right, rtol=TOLERANCE, atol=0)
    assert aten._scaled_dot_product_efficient_attention(query, key, value, None, False)[1].shape == (2, 4, 0)


@pytest.mark.parametrize("kernel", [flash, cudnn], ids=["flash", "cudnn"])
def test_parts_of_keys_have_parts_of_gradients(kernel: Kernel) -> None:
    """Backward with the result and the statistics of all keys, given some of them, as rings call it."""
    inputs = tensors(4, 4, 6, 8)
    result, statistics, *_ = kernel(*inputs)
    weight = torch.randn_like(result)
    right = grad((written_out(*inputs) * weight).sum(), inputs)
    parts = []
    for part in (slice(0, 4), slice(4, 8)):
        query, key, value = inputs[0], inputs[1][:, :, part], inputs[2][:, :, part]
        kept = (weight, query, key, value, result, statistics)
        none = (None, None, 6, 4, 0.0, False)
        if kernel is flash:
            parts.append(aten._scaled_dot_product_flash_attention_backward(*kept, *none, None, None))
        else:
            parts.append(aten._scaled_dot_product_cudnn_attention_backward(*kept, None, None, None, *none))
    assert torch.allclose(parts[0][0] + parts[1][0], right[0], rtol=TOLERANCE)
    for index in (1, 2):
        assert torch.allclose(torch.cat([made[index] for made in parts], 2), right[index], rtol=TOLERANCE)


@pytest.mark.parametrize("kernel", [flash, efficient, cudnn], ids=["flash", "efficient", "cudnn"])
def test_backward_drops_the_weights_that_forward_dropped(kernel: Kernel) -> None:
    def results(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return kernel(*inputs, dropout_p=0.25)[0]

    assert gradcheck(results, tensors(2, 2, 4, 5), check_undefined_grad=False)


@pytest.mark.parametrize("kernel", [flash, efficient, cudnn], ids=["flash", "efficient", "cudnn"])
def test_dropout_keeps_the_mean(kernel: Kernel) -> None:
    query, key, _ = tensors(2, 2, 50, 200)
    ones = torch.ones(2, 2, 200, 8, dtype=torch.float64)
    first, second = (kernel(query, key, ones, dropout_p=0.5)[0] for _ in range(2))
    assert abs(float(first.detach().mean()) - 1) < 0.05
    assert not torch.equal(first, second)
