"""A mixture of experts as GShard writes it: every expert takes so many tokens, told by a mask, all in products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.patterns.units.unit_models import build_seeded


class Experts(nn.Module):
    """Top-1 routing to experts of limited capacity; groups of tokens are routed apart (GShard, section 3.2).

    Args:
        width: of a token.
        inner: width inside of an expert.
        experts: how many.
        capacity: tokens of one group that an expert takes; the others pass by.
    """

    def __init__(self, width: int, inner: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens `[groups, tokens, width]` to tokens of the same shape."""
        gates = self.gate(x).softmax(-1)
        chosen = functional.one_hot(gates.argmax(-1), gates.shape[-1]).to(x.dtype)
        place = (chosen.cumsum(1) * chosen - 1).to(torch.int64)
        slots = torch.arange(self.capacity, device=x.device)
        dispatch = (place.unsqueeze(-1) == slots).to(x.dtype)  # [group, token, expert, slot]
        combine = dispatch * (gates * chosen).unsqueeze(-1)
        taken = torch.einsum("gtes,gtw->egsw", dispatch, x)
        inner = functional.gelu(torch.einsum("egsw,ewi->egsi", taken, self.up))
        given = torch.einsum("egsi,eiw->egsw", inner, self.down)
        return torch.einsum("gtes,egsw->gtw", combine, given)


class Model(nn.Module):
    """A projection, then experts with a residual connection, and the mean square of what comes out."""

    def __init__(self, width: int, inner: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.experts = Experts(width, inner, experts, capacity)
        self.outputs = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        return self.outputs(x + self.experts(x)).square().mean()


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Eight experts and eight groups of twelve tokens, with too little room for some."""
    generator = torch.Generator().manual_seed(1)
    return build_seeded(lambda: Model(16, 24, 8, 3)), {
        "x": torch.randn(8, 12, 16, dtype=torch.float64, generator=generator)
    }


def large() -> tuple[nn.Module, dict[str, Tensor]]:
    """The same of a size that is worth sharding, on the meta device: 8 experts of 235 million parameters in all."""
    with torch.device("meta"):
        module = Model(2048, 8192, 8, 320).to(torch.bfloat16)
        return module, {"x": torch.empty(8, 2048, 2048, dtype=torch.bfloat16)}
