"""Taps at outputs of a forward graph, whose gradients are those of the other outputs for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autoshard.capture.capture_errors import node_place
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.nodes import base_of, changed_memory
from autoshard.errors import CaptureError

aten = torch.ops.aten

TAP = "tap of "
"""The name of a tap begins with this; the name of the output follows."""


def with_taps(exported: Exported, names: Sequence[str]) -> Exported:
    """Return the graph with zeros, a new input each, added to outputs where others are computed from them.

    The new inputs come last, in the order of the names, and are the only ones that require gradients.

    Args:
        exported: the forward graph; changed.
        names: of the outputs.

    Raises:
        CaptureError: an output lies in memory that the graph changes in place, where its gradient has no place.
    """
    graph = exported.graph
    changed = {memory: node for node in graph.nodes for memory in changed_memory(node)}
    outputs = dict(zip(exported.result.names, exported.outputs, strict=False))
    inputs = [replace(item, fake=item.fake.detach()) for item in exported.inputs]
    last = graph.find_nodes(op="placeholder")[-1]
    for name in names:
        node = outputs[name]
        value = node.meta["val"]
        if base_of(node) in changed:
            raise CaptureError(
                f"{node_place(changed[base_of(node)], 'changes the memory of ' + name + ' in place')}, and the "
                f"gradient of another output for {name} is asked for. Write it without the change, as in y = y + 1 in "
                "place of y += 1."
            )
        with exported.inputs[0].fake.fake_mode:
            fake = torch.zeros(value.shape, dtype=value.dtype, device=value.device, requires_grad=True)
        with graph.inserting_after(last):
            last = tap = graph.placeholder(f"tap_{len(inputs)}")
        tap.meta["val"] = fake
        inputs.append(ExportedInput("input", TAP + name, fake, None))
        users = [user for user in node.users if user.op != "output"]
        with graph.inserting_after(tap if node.op == "placeholder" else node):
            tapped = graph.call_function(aten.add.Tensor, (node, tap))
        tapped.meta = {**node.meta, "val": value}
        for user in users:
            user.replace_input_with(node, tapped)
    return replace(exported, inputs=tuple(inputs))
