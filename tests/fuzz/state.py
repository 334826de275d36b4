"""Blocks with a state: buffers that change, parameters that are shared, parametrized or unused, modules of torch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.fuzz.block import HEAD, Block, Registry

BLOCKS = Registry()
MEAN = {"mean": "W"}


@BLOCKS.block(MEAN, scale="W")
def mean_assigned(p: Block, x: Tensor) -> Tensor:
    p.mean = 0.9 * p.mean + 0.1 * x.detach().mean((0, 1))
    return (x - p.mean) * (1 + p.scale)


@BLOCKS.block(MEAN, scale="W")
def mean_in_place(p: Block, x: Tensor) -> Tensor:
    p.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return (x - p.mean) * (1 + p.scale)


@BLOCKS.block(MEAN, scale="W")
def mean_copied(p: Block, x: Tensor) -> Tensor:
    old = p.mean.clone()
    with torch.no_grad():
        p.mean.copy_(torch.lerp(p.mean, x.mean((0, 1)), 0.1))
    return (x - old) * (1 + p.scale)


@BLOCKS.block(MEAN, scale="W")
def mean_by_data(p: Block, x: Tensor) -> Tensor:
    out = (x - p.mean) * (1 + p.scale)
    p.mean.data = p.mean * 0.5 + x.detach().sum((0, 1)) / x[..., 0].numel()
    return out


@BLOCKS.block({"mean": "W", "square": "W"}, scale="W")
def statistics_by_hand(p: Block, x: Tensor) -> Tensor:
    mean, square = x.mean((0, 1)), x.square().mean((0, 1))
    p.mean.lerp_(mean.detach(), 0.1)
    p.square.lerp_(square.detach(), 0.1)
    return (x - mean) / (square - mean.square() + 1e-3).sqrt() * (1 + p.scale)


@BLOCKS.block({"queue": "TW"}, weight="WW")
def queue(p: Block, x: Tensor) -> Tensor:
    keys = p.queue.clone().detach().to(x.dtype)
    p.queue[: x.shape[0]] = x.detach()[:, 0]
    return (x @ p.weight @ keys.mT).softmax(-1) @ keys


@BLOCKS.block({"size": "E", "codes": "EW"}, weight="WW")
def codebook_of_means(p: Block, x: Tensor) -> Tensor:
    chosen = F.one_hot((x.detach() @ p.codes.mT).argmax(-1), 4).to(x.dtype)
    p.size = p.size * 0.9 + chosen.sum((0, 1)) * 0.1
    p.codes = p.codes * 0.9 + torch.einsum("bte,btw->ew", chosen, x.detach()) / (p.size[:, None] + 1) * 0.1
    return x @ p.weight + (chosen @ p.codes - x).detach()


@BLOCKS.block({"steps": "1"}, weight="WW")
def count_of_steps(p: Block, x: Tensor) -> Tensor:
    p.steps += 1
    return x @ p.weight / p.steps


class Residual(nn.Module):
    """Modules of torch around a residual."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.modules_in_order = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for module in self.modules_in_order:
            result = module(y)
            y = result[0] if isinstance(result, tuple) else result
        return x + y


class ChannelsFirst(nn.Module):
    """A module that wants channels before positions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x.mT)
        return y.mT


class Checkpointing(nn.Module):
    """A module under activation checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.module, x, use_reentrant=False)
        return y


class Attention(nn.Module):
    """torch's own, of a tensor on itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, width // HEAD, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)


class Dictionary(nn.Module):
    """Layers and parameters by name, some of which nothing uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"used": nn.Linear(width, width), "unused": nn.Linear(width, width)})
        self.scales = nn.ParameterDict({"used": torch.ones(width), "unused": torch.ones(width)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers["used"](x)
        return y * self.scales["used"]


class Frozen(nn.Module):
    """A frozen layer beside one that trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(width, width).requires_grad_(False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + self.adapter(x)
        return y


class Statistics(nn.Module):
    """Running statistics, which another module reads and writes, or this one."""

    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.steps += 1
            share = 1.0 / self.steps.to(x.dtype)
            self.mean = (1 - share) * self.mean + share * x.mean((0, 1))
            self.variance = (1 - share) * self.variance + share * x.var((0, 1))
        return x.mean((0, 1)), x.var((0, 1), unbiased=False)


class NormByHand(nn.Module):
    """Batch norm with its statistics in a submodule.

    Args:
        width: channels.
        way: who writes the statistics, and how: "inside", "in place", "assigned" or "copied".
        running: whether what normalises is the running statistics.
    """

    def __init__(self, width: int, way: str, running: bool = False) -> None:
        super().__init__()
        self.way, self.running = way, running
        self.statistics = Statistics(width)
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        held = self.statistics
        rows = x.reshape(-1, x.shape[-1])
        mean, variance = rows.mean(0), (rows - rows.mean(0)).square().mean(0)
        if self.way == "inside":
            mean, variance = held(x)
        elif self.way == "in place":
            held.mean.mul_(0.9).add_(0.1 * mean.detach())
            held.variance.lerp_(variance.detach() * rows.shape[0] / (rows.shape[0] - 1), 0.1)
            held.steps.add_(1)
        elif self.way == "assigned":
            held.mean = held.mean + (mean.detach() - held.mean) * 0.1
            held.variance = torch.lerp(held.variance, variance.detach(), 0.1)
        else:
            with torch.no_grad():
                for buffer, new in ((held.mean, mean), (held.variance, variance)):
                    buffer.copy_(buffer * 0.9 + new * 0.1)
                held.steps.copy_(held.steps + 1)
        if self.running:
            mean, variance = held.mean.clone(), held.variance.clone()
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.scale + self.shift


class Expanded(torch.autograd.Function):
    """A product with a gradient written by hand."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = context.saved_tensors
        return gradient @ weight.mT, x.flatten(0, 1).mT @ gradient.flatten(0, 1)


@BLOCKS.block(weight="WW")
def gradient_by_hand(p: Block, x: Tensor) -> Tensor:
    y: Tensor = Expanded.apply(x, p.weight)
    return y


def _twice(module: nn.Module) -> Residual:
    return Residual(module, nn.GELU(), module)


def _tied_weights(width: int) -> Residual:
    first, second = nn.Linear(width, width), nn.Linear(width, width)
    second.weight = first.weight
    return Residual(first, nn.Tanh(), second)


def _recurrent(kind: type[nn.RNNBase], width: int, **options: Any) -> Residual:
    return Residual(kind(width, width, batch_first=True, **options))


MODULES = {
    "linear_twice": lambda width: _twice(nn.Linear(width, width)),
    "tied_weights": _tied_weights,
    "weight_norm": lambda width: Residual(parametrizations.weight_norm(nn.Linear(width, width))),
    "orthogonal_weight": lambda width: Residual(parametrizations.orthogonal(nn.Linear(width, width))),
    "batch_norm_with_buffers": lambda width: ChannelsFirst(nn.BatchNorm1d(width)),
    "attention_of_torch": lambda width: Residual(Attention(width)),
    "encoder_layer": lambda width: nn.TransformerEncoderLayer(width, width // HEAD, 2 * width, 0.0, batch_first=True),
    "lstm": lambda width: _recurrent(nn.LSTM, width),
    "gru_of_two_layers": lambda width: _recurrent(nn.GRU, width, num_layers=2),
    "elman_both_ways": lambda width: Residual(
        nn.RNN(width, width // 2, batch_first=True, bidirectional=True), nn.Linear(width, width)
    ),
    "run_again": lambda width: Checkpointing(
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
    ),
    "conv_and_group_norm": lambda width: ChannelsFirst(
        nn.Sequential(nn.Conv1d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU())
    ),
    "dictionary": Dictionary,
    **{
        f"norm_{way.replace(' ', '_')}{'_running' * running}": functools.partial(NormByHand, way=way, running=running)
        for way in ("inside", "in place", "assigned", "copied")
        for running in (False, True)
    },
    "frozen": Frozen,
}
