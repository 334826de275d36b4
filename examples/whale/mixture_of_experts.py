"""Whale's Example 5, a mixture of experts: torchrun --nproc-per-node 2 examples/whale/mixture_of_experts.py

Everything is data parallel except the experts, which are split over the devices. In Whale:

    wh.init()
    wh.set_default_strategy(wh.replicate(total_gpus))
    combined_weights, dispatch_inputs = gating_dispatch()
    with wh.split(total_gpus):
        outputs = MoE(combined_weights, dispatch_inputs)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from together import compare
from torch import Tensor, nn

import autoshard

EXPERTS, WIDTH, HIDDEN = 8, 32, 128


class Experts(nn.Module):
    """Every sample goes to its two best experts, weighted; every expert has room for all samples."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 8)

    def gating(self, x: Tensor) -> Tensor:
        """Weights of the experts for every token [samples, tokens, experts], most of them zero."""
        scores = self.gate(x).softmax(-1)
        least = scores.topk(2).values[..., -1:]
        return torch.where(scores >= least, scores, 0.0)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        weights = self.gating(x)
        dispatched = torch.einsum("nte,ntd->entd", weights.ne(0).to(x.dtype), x)
        with autoshard.split(self.devices):
            hidden = F.gelu(torch.einsum("entd,edh->enth", dispatched, self.up))
            outputs = torch.einsum("enth,ehd->entd", hidden, self.down)
        return F.mse_loss(torch.einsum("nte,entd->ntd", weights, outputs), target)


def build(devices: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = Experts(devices)
    autoshard.set_default_strategy(model, autoshard.replicate(devices))
    return model, (torch.randn(8, 4, WIDTH), torch.randn(8, 4, WIDTH))


if __name__ == "__main__":
    compare(build)
