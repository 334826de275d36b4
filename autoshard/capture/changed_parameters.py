"""Parameters that `forward` changes in place without autograd seeing it, as in `weight.data.clamp_(-1, 1)`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture.capture_errors import node_place
from autoshard.capture.export import Exported
from autoshard.capture.nodes import base_of, changed_memory, regions_of
from autoshard.errors import CaptureError

aten = torch.ops.aten


def assign_changed_parameters(exported: Exported, unless: str = "") -> Exported:
    """Change copies of such parameters and assign them instead: autograd allows no in-place change of a leaf.

    The gradient of a copy is passed on unchanged, so a parameter has the gradient with respect to its changed numbers,
    as on one device.

    Args:
        exported: the graph; changed in place.
        unless: why parameters must not be changed; empty if they may.

    Raises:
        CaptureError: an input with a gradient is changed, or a parameter that must not be.
    """
    graph, placeholders = exported.graph, exported.placeholders
    changed: dict[fx.Node, fx.Node] = {}
    for memory, node in _changes(graph):
        if memory in placeholders and placeholders[memory].fake.requires_grad:
            changed.setdefault(memory, node)
    last = next(reversed(placeholders), None)
    copies: dict[fx.Node, fx.Node] = {}
    for source, node in changed.items():
        item = placeholders[source]
        if item.kind != "parameter":
            raise CaptureError(
                f"{node_place(node, f'changes the {item.kind} {item.name} in place, which a gradient is taken for')}. "
                "Compute a new tensor, such as x.clamp(...) in place of x.clamp_(...)."
            )
        if unless:
            raise CaptureError(
                f"{node_place(node, f'changes the parameter {item.name} in place')}: {unless}. Switch the line off, "
                "and change the parameter between steps, behind the optimizer's: with torch.no_grad(): "
                "weight.clamp_(...)."
            )
        with graph.inserting_after(last):
            copy = graph.call_function(aten.clone.default, (source,))
        copy.meta = {key: value for key, value in node.meta.items() if key != "val"} | {"val": source.meta["val"]}
        for user in [user for user in source.users if user is not copy]:
            user.replace_input_with(source, copy)
        copies[source] = copy
    outputs = tuple(copies.get(node, node) for node in exported.outputs)
    assigned = [(name, copies.get(node, node)) for name, node in exported.assigned]
    assigned += [(placeholders[source].name, copy) for source, copy in copies.items()]
    return replace(exported, outputs=outputs, assigned=tuple(assigned))


def _changes(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield each node whose memory is changed in place, with the node that changes it, in regions too."""
    for node in graph.nodes:
        yield from ((memory, node) for memory in changed_memory(node))
        # A region, such as code under torch.no_grad, is a call of a graph followed by its operands.
        for source, region in regions_of(node):
            operands = node.args[node.args.index(source) + 1 :]
            passed = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=False))
            for memory, change in _changes(region.graph):
                if isinstance(operand := passed.get(memory), fx.Node):
                    yield base_of(operand), change
