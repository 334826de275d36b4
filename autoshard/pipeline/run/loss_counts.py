"""What every microbatch counts in a mean over what counts: tokens that are not to be ignored, and not sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from autoshard.pipeline.graph.forward_export import ExportedModule

aten = torch.ops.aten

_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index")
_DEFAULTS = {"weight": None, "reduction": 1, "ignore_index": -100}
_MEAN = 1
_SAME = (aten.to.dtype, aten.alias.default, aten.view.default, aten.reshape.default, aten.contiguous.default)

Count = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""From the inputs of a microbatch, by their names, how much counts in it."""


def target_count(graph: ExportedModule, loss: fx.Node) -> Count | None:
    """How many targets count in a microbatch's loss, where that is their mean.

    Args:
        graph: of one microbatch.
        loss: the output that is differentiated.

    Returns:
        What counts them, where the loss is a cross-entropy or the like, without weights of classes, of targets that
        come from inputs alone. None for all other losses.
    """
    while loss.target in _SAME:
        loss = loss.all_input_nodes[0]
    if loss.target not in _LOSSES:
        return None
    said: dict[str, Any] = {**_DEFAULTS, **dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}
    target = said["target"]
    if said["weight"] is not None or said["reduction"] != _MEAN or target.meta["val"].is_floating_point():
        return None
    program = _count_program(graph, target, said["ignore_index"])
    if program is None:
        return None
    read = {node.target for node in program.graph.find_nodes(op="placeholder")}
    names = {source.name: str(node.target) for node, source in graph.sources.items() if node.target in read}

    def count(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return program(**{node: inputs[name] for name, node in names.items()})

    return count


def loss_shares(count: Count | None, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """What part of the whole batch's loss every microbatch's has: a vector whose sum is 1."""
    if count is None:
        return torch.full((len(microbatches),), 1 / len(microbatches), dtype=torch.float64)
    counts = torch.stack([count(inputs) for inputs in microbatches]).double()
    return counts / counts.sum()


def _count_program(graph: ExportedModule, target: fx.Node, ignored: int) -> fx.GraphModule | None:
    """A program that makes the targets of inputs, and counts; None where they depend on anything else."""
    needed, waiting = set[fx.Node](), [target]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    sources = graph.sources
    fixed = any(node.op == "get_attr" or (node in sources and sources[node].kind != "input") for node in needed)
    if fixed or not graph.random.isdisjoint(node.name for node in needed):
        return None
    program = fx.Graph()
    own: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node in needed:
            own[node] = program.node_copy(node, own.__getitem__)
    counts = program.call_function(aten.ne.Scalar, (own[target], ignored))
    program.output(program.call_function(aten.sum.default, (counts,)))
    return fx.GraphModule(nn.Module(), program)
