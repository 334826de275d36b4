"""Old values of what a step changes: kept where they are read when the new ones are written already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autoshard.capture.joint_graph import JointInput, JointOutput
from autoshard.capture.layers import is_view

aten = torch.ops.aten


def keep_old_values(graph: fx.Graph, inputs: Sequence[JointInput], outputs: Sequence[JointOutput]) -> None:
    """Copy a changed input where the backward half or the caller reads its old value, in place of the input itself.

    New values are written into buffers (and other inputs) when the forward half is done. A functional graph knows
    nothing of that: in it, the copy that a queue of keys is read from is the queue.

    Args:
        graph: a joint graph without dead code; its output node names the nodes of `outputs`.
        inputs: its placeholders.
        outputs: what the step hands back.
    """
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
    """Whether the backward half or the caller reads an input, or views of it."""
    seen = {changed}
    waiting = [changed]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or "backward" in user.meta["partitioner_tag"]:
                return True
            if is_view(user) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
