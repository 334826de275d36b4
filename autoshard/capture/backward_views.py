"""Views of parameters are taken anew in the backward half: a gathered parameter need not outlive the forward."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.alias.default,
    }
)


def refresh_views(graph: fx.Graph, parameters: Collection[fx.Node], is_backward: Callable[[fx.Node], bool]) -> None:
    """Give backward nodes that read a forward view of a parameter a view of their own.

    Then whatever the backward half needs of a parameter starts at the parameter itself, and a plan may keep a
    gathered copy from the forward or gather it again (TensorOpt 4.2, tensor reuse).

    Args:
        graph: a joint graph.
        parameters: its parameter placeholders.
        is_backward: the half that a node belongs to.
    """
    chains = _chains(graph, parameters)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in chains and not is_backward(source):
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_view_chain(graph, source, chains, copies, node))


def _chains(graph: fx.Graph, parameters: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes that are views of a parameter."""
    chains: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.target in _VIEWS and len(sources) == 1 and (sources[0] in chains or sources[0] in parameters):
            chains.add(node)
    return chains


def _copy_view_chain(
    graph: fx.Graph, source: fx.Node, chains: set[fx.Node], copies: dict[fx.Node, fx.Node], user: fx.Node
) -> fx.Node:
    if source not in chains:
        return source
    if source not in copies:
        parent = _copy_view_chain(graph, source.all_input_nodes[0], chains, copies, user)
        copy = graph.node_copy(source, lambda _: parent)
        copy.meta["partitioner_tag"] = user.meta["partitioner_tag"]
        copies[source] = copy
    return copies[source]
