"""Copies of the old values of buffers and inputs that a step changes, for nodes that read them late."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoshard.capture.joint_graph import JointInput, JointOutput
from autoshard.capture.nodes import closure, is_view

aten = torch.ops.aten


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
