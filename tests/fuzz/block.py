"""What random models are made of: a function with parameters and buffers, from `[batch, time, width]` to the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EXPERTS = 4
HEAD = 4

Function = Callable[..., Any]


class Block(nn.Module):
    """A function of itself and a tensor, with parameters and buffers of declared shapes.

    Shapes are texts, one letter a dim: W the width, F twice and T three times that, H heads, D their width, E experts,
    3 three, and 1 one.

    Args:
        function: called with the block and its input.
        width: of the input.
        parameters, buffers: shapes by name.
    """

    def __init__(self, function: Function, width: int, parameters: dict[str, str], buffers: dict[str, str]) -> None:
        super().__init__()
        self.width, self.heads = width, width // HEAD
        self.function = function
        sizes = {"W": width, "F": 2 * width, "T": 3 * width, "H": self.heads, "D": HEAD, "E": EXPERTS, "3": 3, "1": 1}
        for name, letters in parameters.items():
            shape = [sizes[letter] for letter in letters]
            scale = 0.3 if len(shape) == 1 else shape[-2] ** -0.5
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * scale))
        for name, letters in buffers.items():
            self.register_buffer(name, torch.rand([sizes[letter] for letter in letters]) + 0.5)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)

    def extra_repr(self) -> str:
        return self.function.__name__


def split_heads(block: Block, x: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, time, width of a head]`."""
    return x.unflatten(-1, (block.heads, HEAD)).transpose(1, 2)


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(2)


class Registry(dict[str, Callable[[int], Block]]):
    """Makers of blocks of a width, by name."""

    def block(self, buffers: dict[str, str] | None = None, **parameters: str) -> Callable[[Function], Function]:
        """Enter a function with these parameters and buffers."""

        def enter(function: Function) -> Function:
            self[function.__name__] = lambda width: Block(function, width, parameters, buffers or {})
            return function

        return enter
