"""Taps: inputs added to outputs, whose gradients are those of other outputs with respect to these outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autoshard.capture._torch import FakeTensor
from autoshard.capture.capture_errors import node_place
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.nodes import base_of, changed_memory
from autoshard.errors import CaptureError

aten = torch.ops.aten

TAP = "tap of "
"""The name of a tap: this prefix and the name of the output."""


def with_taps(exported: Exported, names: Sequence[str]) -> Exported:
    """Add zeros, a new input each, to outputs from which others are computed, and return the graph.

    The new inputs are last, in the order of the names, and are the only ones that require gradients.

    Args:
        exported: the forward graph; changed.
        names: the names of the outputs.

    Raises:
        CaptureError: the graph changes an output's memory in place, so its gradient is not defined.
    """
    graph = exported.graph
    changed = {memory: node for node in graph.nodes for memory in changed_memory(node)}
    outputs = dict(zip(exported.result.names, exported.outputs, strict=False))
    inputs = [replace(item, fake=item.fake.detach()) for item in exported.inputs]
    last = graph.find_nodes(op="placeholder")[-1]
    first = exported.inputs[0].fake
    assert isinstance(first, FakeTensor)
    mode = first.fake_mode
    for name in names:
        node = outputs[name]
        value = node.meta["val"]
        if base_of(node) in changed:
            raise CaptureError(
                f"{node_place(changed[base_of(node)], 'changes the memory of ' + name + ' in place')}, and the "
                f"gradient of another output for {name} is asked for. Write it without the change, as in y = y + 1 in "
                "place of y += 1."
            )
        # The mode of all inputs, which is not the export's own.
        with mode:
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
