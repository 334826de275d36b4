"""Which ATen operators a function calls, forward and backward, with what: as they stand in a captured joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.patterns.registry import call_of
from autoshard.patterns.rule import OpCall
from tests.patterns.soundness._torch import (
    OpOverload,
    TorchDispatchMode,
    functionalization,
    to_functional,
    tree_leaves,
    tree_map_only,
)


@dataclass(frozen=True, slots=True)
class RecordedOperator:
    """One call of an operator on real tensors, and the function in which it was met."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    source: str

    @property
    def call(self) -> OpCall:
        return call_of(self.op, self.args, self.kwargs, self.results)


class _Recorder(TorchDispatchMode):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.calls: list[RecordedOperator] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if not self.paused:
            self.calls.append(RecordedOperator(func, tuple(args), dict(kwargs or {}), results, self.source))
        return results


def record(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], source: str
) -> list[RecordedOperator]:
    """Call a function and differentiate it with respect to the tensors that require a gradient.

    Args:
        function: made of torch operators.
        args: its arguments; they are not changed.
        kwargs: its keyword arguments.
        source: what to call the function in the records.
    """
    recorder = _Recorder(source)
    wanted: list[torch.Tensor] = []

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        value = to_functional(tensor.detach()).requires_grad_(tensor.requires_grad)
        wanted.extend([value] if tensor.requires_grad else [])
        return value

    with recorder, functionalization():
        recorder.paused = True
        inside = tree_map_only(torch.Tensor, wrap, (tuple(args), dict(kwargs)))
        recorder.paused = False
        outputs = tree_leaves(function(*inside[0], **inside[1]))
        outputs = [value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
        if outputs and wanted:
            recorder.paused = True
            generator = torch.Generator().manual_seed(0)
            tangents = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in outputs]
            recorder.paused = False
            torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)
    return recorder.calls
