"""Tensors that the backward half of a compiled program recomputes where it reads them, instead of saving them.

A kernel that reads such a tensor computes it element-wise from tensors that are saved anyway, which takes less time
than writing and rereading it. A compiler's partitioner does the same; here, the account of a plan includes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoshard.program.aliasing import view_source
from autoshard.program.fusion import MOST_SHARED_SOURCES, fuses, is_pointwise, readers_of

Sources = frozenset[fx.Node]


def compute_where_read(backward: fx.Graph, saved: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Recompute saved tensors in the kernels of the backward half that read them, where that is cheap.

    No other tensor is saved instead. Tensors read by operators that do not fuse are still saved, since they would have
    to be materialised.

    Args:
        backward: the backward half.
        saved: its placeholders -> their nodes in the forward half.

    Returns:
        The dropped placeholders.
    """
    chains, dropped = _PointwiseChains(saved), set()
    place = {node: number for number, node in enumerate(backward.nodes)}
    # In the order of the forward half: tensors come after those they are computed from.
    for placeholder, node in sorted(saved.items(), key=lambda pair: chains.place[pair[1]]):
        if placeholder.users and all(map(fuses, readers_of(placeholder))) and chains.end_at(node):
            reader = min(placeholder.users, key=place.__getitem__)
            placeholder.replace_all_uses_with(chains.insert(node, reader))
            backward.erase_node(placeholder)
            dropped.add(placeholder)
    return dropped


class _PointwiseChains:
    """Chains of element-wise operators, from tensors that stay saved.

    Args:
        saved: placeholders of the backward half -> their nodes in the forward half.
    """

    def __init__(self, saved: Mapping[fx.Node, fx.Node]) -> None:
        self._placeholders = {node: placeholder for placeholder, node in saved.items()}
        self._known: dict[fx.Node, Sources | None] = {}
        forward = next(iter(self._placeholders)).graph.nodes if saved else ()
        self.place = {node: number for number, node in enumerate(forward)}

    def end_at(self, node: fx.Node) -> bool:
        """Return True, and stop saving a tensor, if a chain that computes it is cheaper."""
        sources = self._of_call(node)
        # Saving it means writing and reading it.
        if sources is None or sum(map(_bytes, sources)) > 2 * _bytes(node):
            return False
        del self._placeholders[node]
        self._known[node] = sources
        return True

    def insert(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Insert the chain that computes a tensor before a call of the backward half, and return its last call."""
        copies: dict[fx.Node, fx.Node] = {}

        def copy(each: fx.Node) -> fx.Node:
            if each in self._placeholders:
                return self._placeholders[each]
            if each not in copies:
                for source in each.all_input_nodes:
                    copy(source)
                with reader.graph.inserting_before(reader):
                    made = copies[each] = reader.graph.node_copy(each, copy)
                # It is part of its reader, and takes no extra time.
                made.meta["stands_for"] = ()
                for name in ("position", "partitioner_tag"):
                    if name in reader.meta:
                        made.meta[name] = reader.meta[name]
            return copies[each]

        return copy(node)

    def _of(self, node: fx.Node) -> Sources | None:
        """Return the saved tensors from which a chain computes a node's tensor; None without a chain."""
        if node in self._placeholders:
            return frozenset((node,))
        if node not in self._known:
            self._known[node] = self._of_call(node)
        return self._known[node]

    def _of_call(self, node: fx.Node) -> Sources | None:
        is_view = node.op == "call_function" and view_source(node) is not None
        if not (is_view or is_pointwise(node)) or not isinstance(node.meta["val"], torch.Tensor):
            return None
        sources: Sources = frozenset()
        for source in node.all_input_nodes:
            found = self._of(source)
            if found is None or len(sources | found) > MOST_SHARED_SOURCES:
                return None
            sources |= found
        return sources


def _bytes(node: fx.Node) -> int:
    val: torch.Tensor = node.meta["val"]
    return val.numel() * val.element_size()
