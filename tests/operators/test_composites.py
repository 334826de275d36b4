from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import gaussian_nll_loss, scaled_dot_product_attention
from torch.testing import assert_close

from autoshard.capture import capture
from autoshard.capture._torch import pytree
from autoshard.operators.attention.attention_operator import attention, attention_with_dropout, operators
from autoshard.operators.composites import gaussian_nll_loss as likelihood
from autoshard.operators.composites import replace_composites
from tests.capture.interpret import run_joint

aten = torch.ops.aten


class Attention(nn.Module):
    """Attention of a tensor with itself."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=self.dropout, is_causal=True)


def test_attention_with_dropout_is_known_by_its_name() -> None:
    """Two calls of it differ; both are one operator, which is told of a causal mask."""
    x = torch.randn(2, 3, 4, 8, requires_grad=True)
    for dropout, expected in ((0.1, attention_with_dropout), (0.0, attention)):
        module = torch.export.export(Attention(dropout), (x,), strict=False).graph_module
        replace_composites(module.graph)
        assert expected in {node.target for node in module.graph.nodes}
        (call,) = capture(Attention(dropout), (x,), {}).graph.find_nodes(
            op="call_function", target=operators.attention.default
        )
        assert call.args[5] is True
        assert call.args[8:9] == ((dropout,) if dropout else ())


class Likelihood(nn.Module):
    """A mean and a variance for every sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.mean, self.variance, self.options = nn.Linear(4, 3), nn.Linear(4, 3), options

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gaussian_nll_loss(self.mean(x), y, self.variance(x).square(), **self.options)


@pytest.mark.parametrize("options", [{}, {"full": True, "reduction": "sum"}, {"eps": 0.5}])
def test_gaussian_likelihood_is_captured_and_is_the_same(options: dict[str, Any]) -> None:
    module, args = Likelihood(**options).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    x, y = args[0], args[1, :, :3]
    graph = capture(module, (x, y), {})
    loss = module(x, y)
    loss.backward()
    run = run_joint(graph, module, (x, y))
    torch.testing.assert_close(run.output, loss)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(run.gradients[name], parameter.grad)


def test_variances_of_other_shapes() -> None:
    mean, y = torch.randn(2, 4, 3)
    for variance in (torch.rand(4), torch.rand(4, 1), torch.rand(1, 3), 0.3):
        expected = gaussian_nll_loss(mean, y, variance, reduction="none")
        torch.testing.assert_close(likelihood(mean, y, variance, reduction="none"), expected)
    with pytest.raises(ValueError, match=r"var has shape \[3\], input \[4, 3\]"):
        likelihood(mean, y, torch.rand(3))
    with pytest.raises(ValueError, match="reduction='mode' is none of"):
        likelihood(mean, y, torch.rand(4), reduction="mode")


class Region(nn.Module):
    """A recurrent layer in a region of its own, and a linear layer after it."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self.region = region
        self.layer, self.last = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region():
            x, _ = self.layer(x)
        return self.last(x.float()).sum()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("region", [torch.no_grad, partial(torch.autocast, "cpu", torch.bfloat16)])
def test_regions_of_an_exported_graph_are_rewritten_too(kind: type[nn.RNNBase], region: Any) -> None:
    module, x = Region(region), torch.randn(4, 2, 6)
    module.layer = kind(6, 8)
    graph = capture(module, (x,), {})
    assert any("_steps" in str(node.target) for node in graph.graph.nodes)
    with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):  # else it has no such LSTM
        expected = module(x)
    # What bfloat16 rounds, it rounds in another order here.
    torch.testing.assert_close(run_joint(graph, module, (x,)).output, expected, rtol=2e-2, atol=2e-2)


class Placed(nn.Module):
    """Tensors put on a device by name, in all spellings."""

    def __init__(self, device: Any, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.product, self.device = nn.Linear(4, 4), device
        self.__dict__.update(tensors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.product(x.to(self.device)) + torch.arange(4, device=self.device)
        x = x + torch.ones(4).to(device=self.device, dtype=x.dtype) + torch.zeros_like(x, device=self.device)
        x = x + torch.ones(4).cuda() + x.new_ones(4, device=self.device) + torch.full((4,), 2.0, device=self.device)
        return x.cpu().sum()


def test_devices_that_code_names_mean_nothing() -> None:
    """A plan may be made where there is no such device."""
    prints = set()
    for device in ("cpu", "cuda", "cuda:3", torch.device("cuda", 1)):
        graph = capture(Placed(device), (torch.ones(3, 4),), {})
        prints.add(graph.fingerprint)
        for node in graph.graph_module.graph.nodes:
            assert "device" not in node.kwargs
            assert "cuda" not in str((node.args, node.kwargs))
    assert len(prints) == 1


class Asking(nn.Module):
    """Goes another way on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3.0 if x.is_cuda else 2.0)


def test_code_that_asks_for_a_gpu_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"test_composites.py:\d+ .*asks whether a tensor is on a GPU"):
        capture(Asking(), (torch.ones(3, 4),), {})


def test_the_default_device_means_nothing() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(3, 4)
    expected = capture(module, (x,), {}).fingerprint
    torch.set_default_device("meta")
    try:
        assert capture(module, (x,), {}).fingerprint == expected
    finally:
        torch.set_default_device(None)


def test_where_the_module_is_means_nothing() -> None:
    with torch.device("meta"):
        module, x = nn.Linear(4, 4), torch.ones(3, 4)
    assert capture(module, (x,), {}).fingerprint == capture(nn.Linear(4, 4), (torch.ones(3, 4),), {}).fingerprint


def _in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.permute(tuple(order)).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def _attend(x: Tensor) -> Tensor:
    return scaled_dot_product_attention(x, x, x[..., :2])


COMPOSITES: dict[str, tuple[int, Callable[[], Callable[[Tensor], Any]]]] = {
    "attention": (4, lambda: _attend),
    "attention of one sample": (3, lambda: _attend),
    "attention of five dims": (4, lambda: lambda x: _attend(x.unsqueeze(1))),
    "rms_norm": (4, lambda: lambda x: functional.rms_norm(x, (4,))),
    "LSTM": (3, lambda: nn.LSTM(4, 3, 2)),
    "LSTM of rows": (3, lambda: nn.LSTM(4, 3, batch_first=True, bidirectional=True)),
    "GRU": (3, lambda: nn.GRU(4, 3)),
    "RNN": (3, lambda: nn.RNN(4, 3, batch_first=True)),
    "LSTMCell": (2, lambda: nn.LSTMCell(4, 3)),
    "GRUCell": (2, lambda: nn.GRUCell(4, 3)),
}
"""The number of dims of the operand, and what makes the composite."""


class Viewed(nn.Module):
    """Views of a composite's results that torch allows where memory is in the order that torch itself leaves."""

    def __init__(self, composite: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.composite = composite

    def forward(self, x: Tensor) -> list[Tensor]:
        outer = range(x.dim() - 1)
        orders = [*((*order, x.dim() - 1) for order in itertools.permutations(outer)), tuple(range(x.dim()))[::-1]]
        found = []
        for order in orders:
            for value in pytree.tree_leaves(self.composite(_in_memory_order(x, order))):
                dims = ((*order, value.dim() - 1) for order in itertools.permutations(range(value.dim() - 1)))
                view = next(filter(Tensor.is_contiguous, map(value.permute, dims)))
                found += [view.contiguous().view(-1) * 2, value + 1]
                view.view(-1)[1:].mul_(3)
                found.append(value)
        return found


@pytest.mark.parametrize("name", COMPOSITES)
def test_results_are_viewed_in_the_order_of_memory_that_torch_leaves(name: str) -> None:
    dims, composite = COMPOSITES[name]
    module, x = Viewed(composite()).double(), torch.randn((2, 3, 5, 4)[-dims:], dtype=torch.float64)
    with torch.no_grad():
        graph = capture(module, (x,), {}, grad=False)
        output, expected = run_joint(graph, module, (x,)).output, module(x)
    assert_close(output, expected)
