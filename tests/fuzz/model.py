"""A random model: blocks between an embedding and a head, drawn by a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz import attention, mixing, state, values
from tests.fuzz.heads import HEADS

BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    **{name: make for module in (attention, mixing, values, state) for name, make in module.BLOCKS.items()},
    **state.MODULES,
}
TOKENS = 20
TIME = 6
JOINS = ("add", "norm", "replace")


@dataclass(frozen=True, slots=True)
class RandomModel:
    """What a random model is made of.

    Attributes:
        blocks: their names, and how each one's result joins its input: added, added and normed, or in place of it.
        head: its name.
        width, batch: sizes.
        tokens: whether it takes tokens, or vectors.
    """

    blocks: tuple[tuple[str, str], ...]
    head: str
    width: int
    batch: int
    tokens: bool

    @classmethod
    def of(cls, draw: random.Random) -> RandomModel:
        names = [draw.choice(sorted(BLOCKS)) for _ in range(draw.choice((1, 2, 2, 3, 4)))]
        return cls(
            tuple((name, draw.choice(JOINS)) for name in names),
            draw.choice(sorted(HEADS)),
            draw.choice((8, 12, 12, 24)),
            draw.choice((2, 4, 5, 6, 8)),
            draw.random() < 0.5,
        )


class Model(nn.Module):
    """The model that was drawn."""

    def __init__(self, drawn: RandomModel) -> None:
        super().__init__()
        self.drawn = drawn
        self.embedding = nn.Embedding(TOKENS, drawn.width) if drawn.tokens else nn.Linear(4, drawn.width)
        self.places = nn.Parameter(torch.randn(TIME, drawn.width) * 0.3)  # equal tokens would make equal scores
        self.blocks = nn.ModuleList(BLOCKS[name](drawn.width) for name, _ in drawn.blocks)
        self.norms = nn.ModuleList(
            nn.LayerNorm(drawn.width) if join == "norm" else nn.Identity() for _, join in drawn.blocks
        )
        self.head = HEADS[drawn.head](drawn.width)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        x = self.embedding(x) + self.places
        for block, norm, (_, join) in zip(self.blocks, self.norms, self.drawn.blocks, strict=True):
            y = block(x)
            x = y if join == "replace" else norm(x + y)
        return self.head(x, target)


def inputs_of(drawn: RandomModel, batch: int, seed: int) -> dict[str, Tensor]:
    """A batch for it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(TOKENS, (batch, TIME), generator=generator)
    vectors = torch.randn(batch, TIME, 4, generator=generator)
    return {"x": x if drawn.tokens else vectors, "target": torch.randint(TOKENS, (batch, TIME), generator=generator)}


def tensors_of(result: Any) -> dict[str, Tensor]:
    """The tensors of a model's result by name, the first scalar of which is its loss."""
    if isinstance(result, Tensor):
        return {"output": result}
    if dataclasses.is_dataclass(result):
        result = vars(result)
    items: Mapping[Any, Any] | Sequence[Any] = result
    named = items.items() if isinstance(items, Mapping) else enumerate(items)
    return {str(name): value for name, value in named if isinstance(value, Tensor)}


def loss_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The loss of a call: its scalar, or the mean squares of what has gradients."""
    scalars = [value for value in tensors.values() if value.ndim == 0]
    outputs = [value for value in tensors.values() if value.requires_grad]
    return scalars[0] if scalars else torch.stack([value.abs().square().mean() for value in outputs]).sum()
