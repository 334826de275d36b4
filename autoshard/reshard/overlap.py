"""When collectives run: started as early and awaited as late as their data allows."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from autoshard.patterns.local import collectives

aten = torch.ops.aten

_WAIT = collectives.wait_tensor.default
_GATHER = collectives.all_gather_into_tensor.default
_FOLLOWS = (
    aten.view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.split_with_sizes.default,  # takes joined reductions apart
    operator.getitem,
    aten._to_copy.default,  # the cast of what was reduced
)


def await_late(graph: fx.Graph) -> None:
    """Move every wait, and views and casts of what is awaited, to just before its first user."""
    for node in reversed(list(graph.nodes)):
        if _awaits(node) and node.users:
            min(node.users).prepend(node)  # nodes compare by their places, those moved before included


def _awaits(node: fx.Node) -> bool:
    """Whether the node is a wait, or only a view or a cast of one."""
    if node.target is _WAIT:
        return True
    source = node.args[0] if node.args else None
    return node.target in _FOLLOWS and isinstance(source, fx.Node) and _awaits(source)


def gather_ahead(graph: fx.Graph) -> None:
    """Start every gather of a parameter one gather early, so that it runs behind the compute in between.

    One and not more: each gather in flight holds a whole parameter.
    """
    gathers = [node for node in graph.nodes if node.target is _GATHER and node.all_input_nodes[0].op == "placeholder"]
    for before, node in itertools.pairwise(gathers):
        wait = next(iter(before.users))
        if wait.target is _WAIT and wait < node:
            wait.prepend(node)
