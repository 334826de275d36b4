"""Removal of outputs that training does not read from the graph of a call that computes gradients of a loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture.export import Exported
from autoshard.capture.python.returned_objects import Constant
from autoshard.errors import HintError
from autoshard.names import matching_paths

_DETACHES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default})


def without_unread_outputs(exported: Exported, globs: Sequence[str]) -> Exported:
    """Remove some outputs from the graph of a training call, which returns None for them.

    Nothing changes unless the call returns a loss, a floating-point scalar that depends on something requiring a
    gradient: otherwise gradients come from the other outputs.

    Args:
        exported: the forward graph of a call with gradients; changed in place.
        globs: names of outputs, or globs over them. Names that the call does not have are ignored.

    Raises:
        HintError: no loss remains.
    """
    returned = [leaf for leaf in exported.result.leaves if isinstance(leaf, str)]
    nodes = dict(zip(exported.result.names, exported.outputs, strict=True))
    trained = _differentiable(exported)
    losses = {name for name, node in nodes.items() if node in trained and node.meta["val"].ndim == 0}
    if not losses:
        return exported
    unread = {name for glob in globs for name in matching_paths(glob, returned)}
    if losses <= unread:
        raise HintError(
            f"unread_outputs={tuple(globs)!r} leaves no loss, of which gradients are: the outputs are "
            f"{', '.join(returned)}. Name those alone that training does not read."
        )
    kept = {name: node for name, node in nodes.items() if name not in unread}
    exported.graph.output_node().args = ((*kept.values(), *(node for _, node in exported.assigned)),)
    result = exported.result
    leaves = tuple(Constant(None) if leaf in unread else leaf for leaf in result.leaves)
    views = {name: view for name, view in result.views.items() if name not in unread}
    result = replace(result, leaves=leaves, views=views)
    return replace(exported, outputs=tuple(kept.values()), result=result, unread=tuple(sorted(unread)))


def _differentiable(exported: Exported) -> set[fx.Node]:
    """Return the nodes of numbers that depend on an input that requires a gradient."""
    found = {node for node, item in exported.placeholders.items() if item.fake.requires_grad}
    for node in exported.graph.nodes:
        if node.op == "call_function" and node.target not in _DETACHES and not found.isdisjoint(node.all_input_nodes):
            value = node.meta["val"]
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
                found.add(node)
    return found
