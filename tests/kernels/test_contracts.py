"""What the references refuse, and the layouts, types and further results that they hand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda import cuda_attention

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
WINDOWED = aten._flash_attention_forward.default


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with cuda_attention():
        yield


def halves(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def by_position(*shape: int, device: str = "cpu") -> Tensor:
    """`[b, h, s, d]` as projections leave it: `[b, s, h, d]` in memory."""
    batch, heads, positions, size = shape
    return halves(batch, positions, heads, size, device=device).transpose(1, 2)


def bias(queries: int, keys: int) -> Tensor:
    return torch.zeros(2, 4, queries, keys).bfloat16()


Q, KV = (2, 4, 32, 16), (2, 2, 32, 16)
X = halves(*Q)
REFUSED = {
    "flash float32": (FLASH, "no kernel for torch.float32", lambda: [torch.zeros(Q)] * 3),
    "flash types": (FLASH, "differ", lambda: [X, X.half(), X]),
    "flash head 12": (FLASH, "head size 12", lambda: [halves(2, 4, 8, 12)] * 3),
    "flash head 264": (FLASH, "over 256", lambda: [halves(1, 1, 8, 264)] * 3),
    "flash value": (FLASH, "values have head size 8", lambda: [X, X, halves(2, 4, 32, 8)]),
    "flash groups": (FLASH, "no multiple of 3", lambda: [X, *[halves(2, 3, 32, 16)] * 2]),
    "flash causal": (FLASH, "is_causal with 8 queries", lambda: [X[:, :, :8], *[X] * 2, 0.0, True]),
    "flash layout": (FLASH, "not contiguous", lambda: [halves(2, 4, 16, 32).transpose(2, 3), X, X]),
    "flash max": (WINDOWED, "told of 3 queries", lambda: [*[X] * 3, None, None, 3, 4, 0.0, False, False]),
    "efficient float64": (EFFICIENT, "no kernel", lambda: [*[torch.zeros(Q).double()] * 3, None, True]),
    "efficient groups": (EFFICIENT, "have to be repeated", lambda: [X, halves(*KV), halves(*KV), None, True]),
    "efficient head 12": (EFFICIENT, "not aligned", lambda: [*[halves(2, 4, 8, 12)] * 3, None, True]),
    "efficient offset": (EFFICIENT, "not aligned", lambda: [halves(2, 4, 32, 36)[..., 4:20], *[X] * 2, None, True]),
    "efficient bias": (EFFICIENT, "not expanded", lambda: [*[X] * 3, bias(32, 32)[:, :1], True]),
    "efficient bias type": (EFFICIENT, "bias of torch.float32", lambda: [*[X] * 3, bias(32, 32).float(), True]),
    "efficient bias rows": (EFFICIENT, "not aligned", lambda: [X, *[halves(2, 4, 9, 16)] * 2, bias(32, 9), True]),
    "cudnn float32": (CUDNN, "no kernel", lambda: [*[torch.zeros(Q)] * 3, None, True]),
    "cudnn head 12": (CUDNN, "head size 12", lambda: [*[halves(2, 4, 8, 12)] * 3, None, True]),
    "cudnn head 136": (CUDNN, "over 128", lambda: [*[halves(2, 4, 8, 136)] * 3, None, True]),
    "cudnn one key": (CUDNN, "a single key", lambda: [X, *[halves(2, 4, 1, 16)] * 2, None, True]),
    "cudnn bias type": (CUDNN, "differ", lambda: [*[X] * 3, bias(32, 32).float(), True]),
    "cudnn dropout": (CUDNN, "no multiple of 1/16", lambda: [*[X] * 3, None, True, 0.1]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_forward_refuses(case: str) -> None:
    kernel, message, make = REFUSED[case]
    with pytest.raises(AssertionError, match=message):
        kernel(*make())


def kept_by_efficient() -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    inputs = [halves(2, 4, 8, 16) for _ in range(3)]
    result, statistics, *state = EFFICIENT(*inputs, None, True)
    return inputs, result, statistics, state


BROKEN_STATISTICS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "cut": ("is \\[2, 4, 8\\]", lambda kept: kept[..., :8]),
    "zeros behind": ("behind the last query", lambda kept: kept.masked_fill(kept == torch.inf, 0.0)),
    "odd strides": ("LSE", lambda kept: torch.nn.functional.pad(kept, (0, 1))[..., :32]),
    "not asked for": ("is \\[2, 4, 0\\]", lambda kept: kept[..., :0]),
}


@pytest.mark.parametrize("case", BROKEN_STATISTICS)
def test_backward_of_efficient_refuses_statistics(case: str) -> None:
    message, change = BROKEN_STATISTICS[case]
    inputs, result, statistics, state = kept_by_efficient()
    backward = aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    backward(result, *inputs, None, result, statistics, *state, 0.0, wanted)
    with pytest.raises(AssertionError, match=message):
        backward(result, *inputs, None, result, change(statistics), *state, 0.0, wanted)


def test_backward_of_efficient_has_no_gradient_of_a_bias_that_is_not_there() -> None:
    inputs, result, statistics, state = kept_by_efficient()
    backward = aten._scaled_dot_product_efficient_attention_backward
    with pytest.raises(AssertionError, match="not there"):
        backward(result, *inputs, None, result, statistics, *state, 0.0, [True] * 4)


def test_backward_of_flash_and_cudnn_refuses_statistics_of_other_shapes() -> None:
    query = halves(2, 4, 8, 16)
    result, statistics = FLASH(query, query, query)[:2]
    with pytest.raises(AssertionError, match="logsumexp is"):
        aten._scaled_dot_product_flash_attention_backward(
            result, query, query, query, result, statistics.unsqueeze(-1), None, None, 8, 8, 0.0, False, None, None
        )
    with pytest.raises(AssertionError, match="logsumexp is"):
        aten._scaled_dot_product_cudnn_attention_backward(
            result, query, query, query, result, statistics, None, None, None, None, None, 8, 8, 0.0, False
        )


def described(results: Any) -> list[Any]:
    """Shape, type and strides of tensors, numbers as they are."""
    return [(x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in results]


@pytest.mark.parametrize("make", [halves, by_position])
@pytest.mark.parametrize("value_size", [16, 8])
def test_results_lie_as_torch_says_they_do_on_cuda(make: Callable[..., Tensor], value_size: int) -> None:
    """torch's own functions for tensors without numbers tell shapes, types and layouts of the kernels' results."""

    def run(device: str) -> list[Any]:
        query, key = make(*Q, device=device), make(*Q, device=device)
        value = make(*Q[:3], value_size, device=device)
        mask = torch.zeros(2, 4, 32, 32, device=device).bfloat16()
        made = [EFFICIENT(query, key, value, mask, True), CUDNN(query, key, value, None, True)]
        made.append(
            aten._scaled_dot_product_efficient_attention_backward(
                made[0][0], query, key, value, mask, *made[0], 0.0, [True] * 4
            )
        )
        kept = made[1]
        state = (*kept[:2], kept[6], kept[7], None, None, None, 32, 32, 0.0, False)
        made.append(aten._scaled_dot_product_cudnn_attention_backward(kept[0], query, key, value, *state))
        if value_size == 16:
            kept = FLASH(query, key, value)
            state = (*kept[:2], None, None, 32, 32, 0.0, False, kept[6], kept[7])
            made += [kept, aten._scaled_dot_product_flash_attention_backward(kept[0], query, key, value, *state)]
            made.append(WINDOWED(query, key, value, None, None, 4, 4, 0.0, True, False))
        return [described(results) for results in made]

    assert run("cpu") == run("meta")
