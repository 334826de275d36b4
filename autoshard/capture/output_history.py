"""Autograd state of a call's outputs on one device: which require gradients, and their ancestors among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import WRAP_WITH_GRAD, storage_of
from autoshard.capture.export import Exported
from autoshard.capture.nodes import graphs_of

Edge = tuple[Any, int]
"""An autograd node and the index of its output; for a leaf, the tensor and 0."""

TensorKey = tuple[str, str]
"""The kind of a tensor, such as "output" or "input", and its name."""


@dataclass(frozen=True, slots=True)
class OutputHistories:
    """The autograd state of a call's outputs on one device.

    Attributes:
        differentiable: names of the outputs that require gradients.
        ancestors: for outputs that autograd computes from others, the names of these, nearest first or last.
        memory: for outputs and inputs, by kind and name, a number shared by those in the same memory.
        same: for outputs that are another output or an input itself, its kind and name.
        entangled: names of the outputs that require gradients and share memory with another such tensor, as views and
            returned parameters do: on one device, an in-place change of one is in the history of all.
        of_parameters: for outputs that share a parameter's memory, its name.
    """

    differentiable: frozenset[str] = frozenset()
    ancestors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    memory: Mapping[TensorKey, int] = field(default_factory=dict)
    same: Mapping[str, TensorKey] = field(default_factory=dict)
    entangled: frozenset[str] = frozenset()
    of_parameters: Mapping[str, str] = field(default_factory=dict)


class HistoryWatch:
    """A function of the outputs of a traced graph, called in each of its runs, which records their histories.

    Args:
        names: the names of the outputs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.differentiable: frozenset[str] = frozenset()
        self.ancestors: dict[str, tuple[str, ...]] = {}
        # The name of a call of the watch in a graph's code.
        self.__name__ = "note_histories"

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        edges = {name: _edge(tensor) for name, tensor in zip(self.names, tensors, strict=False) if tensor.requires_grad}
        # Outputs without computation, such as flags, have no history in any run.
        if not edges:
            return
        self.differentiable = frozenset(edges)
        self.ancestors = dict(_ancestors(edges))


def _edge(tensor: torch.Tensor) -> Edge:
    return (tensor, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def _ancestors(edges: Mapping[str, Edge]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the outputs that are computed from others, and the names of these."""
    # By identity, because tensors compare elementwise. The nodes live as long as the outputs do.
    key_of = {name: (id(node), place) for name, (node, place) in edges.items()}
    for name, (start, _) in edges.items():
        if isinstance(start, torch.Tensor):
            continue
        reached: set[tuple[int, int]] = set()
        waiting, seen = [start], {start}
        while waiting:
            for node, place in waiting.pop().next_functions:
                if node is None:
                    continue
                reached.add((id(getattr(node, "variable", node)), place))
                if node not in seen:
                    seen.add(node)
                    waiting.append(node)
        found = tuple(other for other, key in key_of.items() if key in reached and key != key_of[name])
        if found:
            yield name, found


def histories_of(exported: Exported, watch: HistoryWatch) -> OutputHistories:
    """Return the histories of the outputs of an exported graph that was traced with a watch."""
    numbers: dict[int, int] = {}
    memory: dict[TensorKey, int] = {}
    same: dict[str, TensorKey] = {}
    first: dict[fx.Node, TensorKey] = {}
    inputs = [((item.kind, item.name), node) for node, item in exported.placeholders.items()]
    outputs = [(("output", name), node) for name, node in zip(watch.names, exported.outputs, strict=False)]
    for key, node in [*inputs, *outputs]:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            memory[key] = numbers.setdefault(storage_of(value), len(numbers))
        original = first.setdefault(node, key)
        if original[0] not in ("input", "output"):
            # An output is never the object of a parameter or buffer, but several such outputs are one object.
            first[node] = key
        elif original is not key:
            same[key[1]] = original
    computed = [("output", name) for name in watch.names if name in watch.differentiable and name not in same]
    others = [key for key in memory if key[0] in ("parameter", "input")]
    counts = Counter(memory[key] for key in (*computed, *others) if key in memory)
    entangled = frozenset(key[1] for key in computed if counts[memory.get(key, -1)] > 1)
    parameters = {number: name for (kind, name), number in memory.items() if kind == "parameter"}
    outputs_of = {key[1]: parameters[n] for key, n in memory.items() if key[0] == "output" and n in parameters}
    return OutputHistories(watch.differentiable, watch.ancestors, memory, same, entangled, outputs_of)


def enables_gradients(module: fx.GraphModule) -> bool:
    """Return True if an exported graph, called under `torch.no_grad`, computes a part with gradients."""
    return any(
        node.target is WRAP_WITH_GRAD and node.args[0] is True for graph in graphs_of(module) for node in graph.nodes
    )
