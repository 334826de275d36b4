"""Views of parameters, taken again in the backward half.

A gathered parameter then need not stay in memory from the forward half to the backward half.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        *(aten.t.default, aten.permute.default, aten.transpose.int, aten.expand.default, aten.alias.default),
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    }
)


def refresh_views(graph: fx.Graph, parameters: Collection[fx.Node], is_backward: Callable[[fx.Node], bool]) -> None:
    """Give backward nodes that read a forward view of a parameter a view of their own.

    Then whatever the backward half needs of a parameter starts at the parameter itself, and a plan may keep a
    gathered copy from the forward or gather it again (TensorOpt 4.2, tensor reuse).

    Args:
        graph: a joint graph.
        parameters: its parameter placeholders.
        is_backward: returns True for nodes of the backward half.
    """
    views: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        # Nodes are in topological order: the views that a view is taken of are in the set before it.
        if node.target in _VIEWS and len(sources) == 1 and (sources[0] in views or sources[0] in parameters):
            views.add(node)
    # One copy of each view serves all backward nodes: it stands before the first of them.
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_backward(node):
            continue
        for source in node.all_input_nodes:
            if source in views and not is_backward(source):
                with graph.inserting_before(node):
                    node.replace_input_with(source, _copy_view_chain(source, views, copies, node))


def _copy_view_chain(view: fx.Node, views: set[fx.Node], copies: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    """Return a copy of a view, and of the views that it is taken of, in the half of `user`."""
    if view not in views:
        return view  # the parameter itself
    if view not in copies:
        parent = _copy_view_chain(view.all_input_nodes[0], views, copies, user)
        copies[view] = copy = view.graph.node_copy(view, lambda _: parent)
        copy.meta["partitioner_tag"] = user.meta["partitioner_tag"]
    return copies[view]
