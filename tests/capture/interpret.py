"""Running a joint graph on real tensors, as one device would, to compare it with the module itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autoshard.capture import JointGraph


@dataclass(frozen=True)
class Step:
    """What one step gives: the user's output, gradients by name (None included), new values of what it mutates."""

    output: Any
    gradients: dict[str, torch.Tensor | None]
    mutations: dict[str, torch.Tensor]


def run_joint(
    graph: JointGraph,
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    tangents: Mapping[str, torch.Tensor] | None = None,
) -> Step:
    """Interpret the graph with the module's own tensors; a tangent that is not given is all ones."""
    parameters = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    leaves = iter(graph.call.flatten(args, kwargs or {}))
    given = tangents or {}
    values = []
    for item in graph.inputs:
        if item.kind == "parameter":
            values.append(parameters[item.name].detach())
        elif item.kind == "buffer":
            values.append(buffers[item.name].clone())
        elif item.kind == "input":
            values.append(next(leaves).detach())
        elif item.kind == "constant":
            values.append(item.value)
        else:
            expected = item.node.meta["val"]
            values.append(given.get(item.name, torch.ones(expected.shape, dtype=expected.dtype)))
    results = list(zip(fx.Interpreter(graph.graph_module).run(*values), graph.outputs, strict=True))
    return Step(
        graph.result.unflatten([value for value, output in results if output.kind == "output"]),
        {output.name: value for value, output in results if output.kind == "gradient"},
        {output.name: value for value, output in results if output.kind == "mutation"},
    )
