"""The weight of every microbatch in the loss of a batch: of a mean over targets, the number of targets that count."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autoshard.pipeline.graph.forward_export import ExportedModule, ancestors

aten = torch.ops.aten

_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index")
_DEFAULTS = {"weight": None, "reduction": 1, "ignore_index": -100}
_MEAN = 1
_SAME = (aten.to.dtype, aten.alias.default, aten.view.default, aten.reshape.default, aten.contiguous.default)

Count = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Returns the number of targets that count in a microbatch, from its inputs by their names."""


def target_count(graph: ExportedModule, loss: fx.Node) -> Count | None:
    """Return a function that counts the targets of a microbatch's loss, where the loss is their mean.

    Args:
        graph: of one microbatch.
        loss: the output that is differentiated.

    Returns:
        The function, where the loss is a cross-entropy or negative log likelihood without weights of classes, and its
        targets depend on inputs alone. None for all other losses.
    """
    while loss.target in _SAME:
        loss = loss.all_input_nodes[0]
    if loss.target not in _LOSSES:
        return None
    arguments: dict[str, Any] = {**_DEFAULTS, **dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}
    target = arguments["target"]
    if arguments["weight"] is not None or arguments["reduction"] != _MEAN or target.meta["val"].is_floating_point():
        return None
    program = _count_program(graph, target, arguments["ignore_index"])
    if program is None:
        return None
    read = {node.target for node in program.graph.find_nodes(op="placeholder")}
    names = {source.name: str(node.target) for node, source in graph.sources.items() if node.target in read}

    def count(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return program(**{node: inputs[name] for name, node in names.items()})

    return count


def loss_shares(count: Count | None, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return the share of every microbatch in the loss of the batch: a vector whose sum is 1."""
    if count is None:
        return torch.full((len(microbatches),), 1 / len(microbatches), dtype=torch.float64)
    counts = torch.stack([count(inputs) for inputs in microbatches]).double()
    return counts / counts.sum()


def _count_program(graph: ExportedModule, target: fx.Node, ignored: int) -> fx.GraphModule | None:
    """Return a program that computes targets from inputs and counts them; None where they depend on anything else."""
    needed, sources = ancestors([target]), graph.sources
    fixed = any(node.op == "get_attr" or (node in sources and sources[node].kind != "input") for node in needed)
    if fixed or not graph.random.isdisjoint(node.name for node in needed):
        return None
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node in needed:
            copies[node] = program.node_copy(node, copies.__getitem__)
    counts = program.call_function(aten.ne.Scalar, (copies[target], ignored))
    program.output(program.call_function(aten.sum.default, (counts,)))
    return fx.GraphModule(nn.Module(), program)
