"""Tensors that the backward half of a compiled program computes where it reads them, in place of having them saved.

A kernel that reads such a tensor computes it number by number of others that are saved anyway: that takes less than to
write the tensor and to read it again. So a compiler's partitioner would have it; here the account of a plan knows, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from autoshard.program.aliasing import view_source
from autoshard.program.fusion import MOST_SHARED_SOURCES, fuses, is_pointwise, readers_of

Sources = frozenset[fx.Node]


def compute_where_read(backward: fx.Graph, saved: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Compute saved tensors in the kernels of the backward half that read them, where that is cheap.

    Nothing is saved that was not saved before. What another operator reads is left, since it would have to be made.

    Args:
        backward: the backward half.
        saved: its placeholders -> the nodes of the forward half that they are.

    Returns:
        The placeholders that were dropped.
    """
    chains, dropped = _PointwiseChains(saved), set()
    place = {node: number for number, node in enumerate(backward.nodes)}
    # In the order of the forward half: what is computed of others comes behind them.
    for placeholder, node in sorted(saved.items(), key=lambda pair: chains.place[pair[1]]):
        if placeholder.users and all(map(fuses, readers_of(placeholder))) and chains.end_at(node):
            reader = min(placeholder.users, key=place.__getitem__)
            placeholder.replace_all_uses_with(chains.insert(node, reader))
            backward.erase_node(placeholder)
            dropped.add(placeholder)
    return dropped


class _PointwiseChains:
    """Chains of operators that compute number by number, from tensors that stay saved.

    Args:
        saved: placeholders of the backward half -> the nodes of the forward half that they are.
    """

    def __init__(self, saved: Mapping[fx.Node, fx.Node]) -> None:
        self._placeholders = {node: placeholder for placeholder, node in saved.items()}
        self._known: dict[fx.Node, Sources | None] = {}
        forward = next(iter(self._placeholders)).graph.nodes if saved else ()
        self.place = {node: number for number, node in enumerate(forward)}

    def end_at(self, node: fx.Node) -> bool:
        """Return True if a chain makes a saved tensor, which is saved no longer, and is cheaper than to save it."""
        sources = self._of_call(node)
        # To save it is to write and to read it.
        if sources is None or sum(map(_bytes, sources)) > 2 * _bytes(node):
            return False
        del self._placeholders[node]
        self._known[node] = sources
        return True

    def insert(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Insert the chain that makes a tensor before a call of the backward half, and return its last call."""
        copies: dict[fx.Node, fx.Node] = {}

        def copy(each: fx.Node) -> fx.Node:
            if each in self._placeholders:
                return self._placeholders[each]
            if each not in copies:
                for source in each.all_input_nodes:
                    copy(source)
                with reader.graph.inserting_before(reader):
                    made = copies[each] = reader.graph.node_copy(each, copy)
                # It belongs to its reader, and takes no time of its own.
                made.meta["stands_for"] = ()
                for name in ("position", "partitioner_tag"):
                    if name in reader.meta:
                        made.meta[name] = reader.meta[name]
            return copies[each]

        return copy(node)

    def _of(self, node: fx.Node) -> Sources | None:
        """Return the saved tensors of which a node's tensor is computed; None if it is not."""
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
