from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoshard.capture import capture
from autoshard.capture import mixed_precision as precision
from autoshard.capture._torch import operators_under_autocast
from autoshard.errors import CaptureError
from tests.capture.interpret import run_joint

aten = torch.ops.aten

OF_KERNELS = {
    "_cudnn_rnn",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "binary_cross_entropy",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
"""What GPUs alone have kernels of, and what autocast refuses."""


@contextlib.contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Autocast of GPUs as it is where there is one: torch leaves it off where there is none."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_the_list_is_that_of_torch() -> None:
    lists = (
        precision._LOWER_PRECISION,
        precision._FLOAT32,
        precision._FLOAT32_BY_ARGUMENT,
        precision._WIDEST,
    )
    known = {name for names in lists for name in names} | set(precision._FLOAT32_NORMS)
    # Torch 2.11 has operators of named dims, which no graph has.
    found = {name for name in operators_under_autocast("CUDA") if "imname" not in name}
    assert found - known <= OF_KERNELS


class Mixed(nn.Module):
    """A product, a norm, a product without autocast, and exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        with torch.autocast(x.device.type, enabled=False):
            h = self.second(h.float())
        return (self.last(h).exp() + h.softmax(-1)).sum()


class Inside(Mixed):
    """The same under an autocast of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(x)


def dtypes(module: nn.Module, target: object) -> list[torch.dtype]:
    graph = capture(module, (torch.randn(4, 8),), {}).graph_module.graph
    return [node.meta["val"].dtype for node in graph.nodes if node.target == target]


def test_autocast_of_gpus_around_the_capture() -> None:
    with autocast_of_cuda():
        assert dtypes(Mixed(), aten.addmm.default) == [torch.bfloat16, torch.float32, torch.bfloat16]
        assert dtypes(Mixed(), aten.exp.default) == [torch.float32]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.randn(2, 2).bfloat16().exp().dtype == torch.bfloat16


def test_autocast_of_gpus_in_forward_is_the_same() -> None:
    """Also where torch would leave it off, because there is no GPU."""
    x = torch.randn(4, 8)
    with autocast_of_cuda():
        around = capture(Mixed(), (x,), {})
    assert capture(Inside(), (x,), {}).fingerprint == around.fingerprint


class Widened(Mixed):
    """A product of bfloat16 in float32, which the autocast of the CPU does not have."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            h = self.first(x)
            with torch.autocast(self.inner, dtype=torch.float32):
                h = self.second(h)
            return self.last(h).sum()


@pytest.mark.parametrize("inner", ["cuda", "cpu"])
def test_a_region_in_float32_is_in_float32(inner: str) -> None:
    """Also where its device is that of a tensor, which lies on the CPU in a capture."""
    assert dtypes(Widened(inner), aten.addmm.default) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_autocast_of_the_cpu_stays_as_it_is() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes(Mixed(), aten.exp.default) == [torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.randn(2, 2).bfloat16().exp().dtype == torch.bfloat16


def test_the_backward_half_is_that_of_a_call_outside_of_autocast() -> None:
    """What forward computed without autocast has a gradient without it, too."""
    module, x = Mixed(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        graph = capture(module, (x,), {})
        loss = module(x)
    loss.backward()
    run = run_joint(graph, module, (x,))
    torch.testing.assert_close(run.output, loss)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


class Probabilities(nn.Module):
    """A loss of probabilities, which autocast of GPUs refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(x.sigmoid(), torch.ones_like(x))


def test_what_autocast_refuses() -> None:
    with autocast_of_cuda(), pytest.raises(CaptureError, match="binary_cross_entropy_with_logits"):
        capture(Probabilities(), (torch.randn(4, 8),), {})
