"""Stages of a cut one after the other in one process, each with an autograd graph of its own, as ranks have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.stage_modules import StageModule


class Chain:
    """One microbatch on its way through all stages.

    Args:
        exported: what was cut.
        stages: the stages.
        args, kwargs: a call of the whole module.
    """

    def __init__(
        self,
        exported: ExportedModule,
        stages: Sequence[StageModule],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.exported, self.stages = exported, stages
        names = [leaf for leaf in exported.forward.call.leaves if isinstance(leaf, str)]
        self.inputs = dict(zip(names, exported.forward.call.flatten(args, kwargs or {}), strict=True))
        self.received: list[list[torch.Tensor]] = []
        self.returned: list[tuple[torch.Tensor, ...]] = []

    def forward(self) -> Any:
        """What the module returns."""
        handed: tuple[torch.Tensor, ...] = ()
        for stage in self.stages:
            received = []
            for value, tensor in zip(stage.received, handed, strict=True):
                assert (tensor.shape, tensor.dtype) == (value.like.shape, value.like.dtype)
                assert tensor.requires_grad == value.like.requires_grad, value.name
                received.append(tensor.detach().clone(memory_format=torch.contiguous_format))
                received[-1].requires_grad_(value.like.requires_grad)
            keywords = {keyword: self.inputs[name] for name, (keyword, _) in stage.inputs.items()}
            handed = stage.module(*received, **keywords)
            self.received.append(received)
            self.returned.append(handed)
        return self.exported.forward.result.unflatten(list(handed))

    def backward(self) -> None:
        """Gradients of the one scalar that the module returns, handed from stage to stage."""
        (loss,) = (value for value in self.returned[-1] if value.ndim == 0)
        loss.backward()
        for returned, taken in zip(reversed(self.returned[:-1]), reversed(self.received), strict=False):
            pairs = [(out, into.grad) for out, into in zip(returned, taken, strict=True) if into.grad is not None]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def settle_stages(exported: ExportedModule, stage_of: Mapping[str, int]) -> dict[str, int]:
    """The nearest later stages at which no value goes back and what has to stay together does."""
    stages = dict(stage_of)
    bound = [
        *exported.together,
        *((node.name, *(user.name for user in parts)) for node, parts in _multi_output_users(exported)),
    ]
    before: dict[str, int] = {}
    while before != stages:
        before = dict(stages)
        for node in exported.operators:
            stages[node.name] = max(stages.get(name.name, 0) for name in (node, *node.all_input_nodes))
        for group in bound:
            stages.update(dict.fromkeys(group, max(stages[name] for name in group)))
    return stages


def _multi_output_users(exported: ExportedModule) -> list[tuple[Any, list[Any]]]:
    several = [node for node in exported.operators if not isinstance(node.meta["val"], torch.Tensor)]
    return [(node, list(node.users)) for node in several]


def balance_stages(exported: ExportedModule, stages: int) -> dict[str, int]:
    """Equally many operators for every stage, in the order of the graph."""
    operators = exported.operators
    return settle_stages(
        exported, {node.name: place * stages // len(operators) for place, node in enumerate(operators)}
    )
