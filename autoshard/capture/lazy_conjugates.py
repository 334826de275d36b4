"""In-place changes through a lazy conjugate or negative, as in `z.conj().mul_(w)`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from autoshard.capture._torch import OpOverload
from autoshard.capture.nodes import base_of, changed_operands

aten = torch.ops.aten

_LAZY = frozenset({"conj", "_conj", "_neg_view", "adjoint", "mH", "matrix_H"})


def write_out_conjugates(graph: fx.Graph) -> None:
    """Rewrite tensors after such changes: functional graphs would turn a changed tensor into a lazy conjugate.

    Operators that read its parts, such as `view_as_real`, do not accept lazy conjugates.
    """
    for node in list(graph.nodes):
        for changed in changed_operands(node):
            base = base_of(changed)
            if not _LAZY.isdisjoint(_views(changed, base)):
                with graph.inserting_after(node):
                    numbers = graph.call_function(aten.clone.default, (base,))
                with graph.inserting_after(numbers):
                    copy = graph.call_function(aten.copy_.default, (base, numbers))
                numbers.meta = copy.meta = {**node.meta, "val": base.meta["val"]}


def _views(node: fx.Node, base: fx.Node) -> Iterator[str]:
    """Yield the names of the views from a node to the one that made its memory."""
    while node is not base:
        if isinstance(node.target, OpOverload):
            yield node.target._schema.name.split("::")[1]
        node = node.all_input_nodes[0]
