"""Effects of the nodes of an exported graph: which share memory, change it, and have gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture._torch import FakeTensorMode, storage_of, version_of
from autoshard.capture.export import Exported
from autoshard.capture.nodes import statistics
from autoshard.capture.python_calls import tensors_of

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """Effects of the nodes of a graph, found by one run on fake tensors.

    Attributes:
        differentiable: nodes, placeholders among them, whose value (or part of it) requires a gradient.
        memory: the storages in which the value of a node lies, as numbers; equal numbers are one storage.
        changed: the storages that a node changes in place, for nodes that do.
    """

    differentiable: frozenset[fx.Node]
    memory: Mapping[fx.Node, frozenset[int]]
    changed: Mapping[fx.Node, frozenset[int]]


def effects_of(exported: Exported, mode: FakeTensorMode) -> Effects:
    """Return the effects of the nodes of an exported graph, in the active grad mode.

    Args:
        exported: the graph.
        mode: of the fake tensors that are its inputs. Tensors that depend on no input, such as a mask, are fake, too.
    """
    run = _EffectInterpreter(exported.graph_module)
    with mode:
        run.run(*(item.fake for item in exported.inputs))
    memory = {node: frozenset(storage_of(tensor) for tensor in tensors_of(value)) for node, value in run.env.items()}
    differentiable = {node for node, value in run.env.items() if any(each.requires_grad for each in tensors_of(value))}
    return Effects(frozenset(differentiable), memory, run.changed)


class _EffectInterpreter(fx.Interpreter):
    """Interpreter that records which storages nodes change in place."""

    def __init__(self, module: fx.GraphModule) -> None:
        # Values stay alive: the number of a storage that was freed would stand for another one later.
        super().__init__(module, garbage_collect_values=False)
        self.changed: dict[fx.Node, frozenset[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        tensors = [tensor for source in n.all_input_nodes for tensor in tensors_of(self.env[source])]
        before = [version_of(tensor) for tensor in tensors]
        result = super().run_node(n)
        changed = [tensor for tensor, version in zip(tensors, before, strict=True) if version_of(tensor) != version]
        changed += [self.env[source] for source in statistics(n, self.module)]
        if changed:
            self.changed[n] = frozenset(storage_of(tensor) for tensor in changed)
        return result
