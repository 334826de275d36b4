"""When collectives run: started as early and awaited as late as their data allows."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from autoshard.patterns.local import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_MOVES = (aten.view.default, aten.reshape.default, aten.permute.default)


def await_late(graph: fx.Graph) -> None:
    """Move every wait, and views of what is awaited, to just before its first user."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in reversed(list(graph.nodes)):
        if not _awaits(node) or not node.users:
            continue
        first = min(node.users, key=order.__getitem__)
        first.prepend(node)
        order[node] = order[first]  # users of its operands see it where it now stands


def _awaits(node: fx.Node) -> bool:
    """Whether the node is a wait, or only reads one and does no work."""
    if node.target is _WAIT:
        return True
    source = node.args[0] if node.args else None
    return node.target in _MOVES and isinstance(source, fx.Node) and _awaits(source)


def gather_ahead(graph: fx.Graph) -> None:
    """Start every gather of a parameter one gather early, so that it runs behind the compute in between.

    One and not more: each gather in flight holds a whole parameter.
    """
    gathers = [node for node in graph.nodes if node.target is _GATHER and node.all_input_nodes[0].op == "placeholder"]
    for before, node in itertools.pairwise(gathers):
        wait = next(iter(before.users))
        if wait.target is _WAIT and wait < node:
            wait.prepend(node)
