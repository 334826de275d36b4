"""Forward values that the backward half reads: views of parameters are taken again, old values are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import fx

from autoshard.capture.joint_graph import JointInput, JointOutput
from autoshard.capture.nodes import closure, is_view

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


def keep_old_values(graph: fx.Graph, inputs: Sequence[JointInput], outputs: Sequence[JointOutput]) -> None:
    """Copy every changed input whose old value the backward half or the caller reads.

    Args:
        graph: a joint graph without dead code; its output node names the nodes of `outputs`.
        inputs: the placeholders of the graph.
        outputs: the outputs of the step.
    """
    # New values are written into buffers and inputs at the end of the forward half, which a functional graph does not
    # show: simplification has removed copies that models make themselves, such as that of a queue of keys.
    changed = {output.name: output.node for output in outputs if output.kind == "mutation"}
    last = graph.find_nodes(op="placeholder")[-1]
    for source in inputs:
        if source.kind != "tangent" and source.name in changed and _is_read_late(source.node):
            with graph.inserting_after(last):
                copy = graph.call_function(aten.clone.default, (source.node,))
            copy.meta = {key: value for key, value in source.node.meta.items() if key != "desc"}
            for user in [user for user in source.node.users if user is not copy]:
                user.replace_input_with(source.node, copy)


def _is_read_late(changed: fx.Node) -> bool:
    """Return True if the backward half or the caller reads an input, or a view of it."""
    views = closure([changed], lambda node: filter(is_view, node.users))
    users = (user for view in views for user in view.users)
    return any(user.op == "output" or "backward" in user.meta["partitioner_tag"] for user in users)
