"""Flat graphs of operators, such as stages of pipelines, which need no export; and the effects of their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import fx, nn

from autoshard.capture._torch import FakeTensorMode, pytree, storage_of, version_of
from autoshard.capture.call_layout import ResultLayout, call_layout, result_names
from autoshard.capture.export import Exported, ExportedInput, named_tensors
from autoshard.capture.nodes import statistics
from autoshard.capture.python.called_code import tensors_of

aten = torch.ops.aten

ASSIGNS = "assigns"
"""Key in the meta of a copy into a buffer that comes behind all readers of the buffer."""


def with_copies(exported: Exported) -> Exported:
    """Return the graph with assignments of buffers as copies into them: the last operators, marked in their meta."""
    graph = exported.graph
    buffers = {item.name: node for node, item in exported.placeholders.items() if item.kind == "buffer"}
    # Readers of such a buffer read a copy of its old value: autograd and views never meet the new one.
    old: dict[fx.Node, fx.Node] = {}
    for buffer in (buffers[name] for name, _ in exported.assigned):
        if buffer.users:
            with graph.inserting_before(min(buffer.users)):
                copy = old[buffer] = graph.call_function(aten.clone.default, (buffer,))
            copy.meta = {**copy.next.meta, "val": buffer.meta["val"]}
            for user in [user for user in buffer.users if user is not copy]:
                user.replace_input_with(buffer, copy)
    with graph.inserting_before(graph.output_node()):
        for name, assigned in exported.assigned:
            value = old.get(assigned, assigned)
            copy = graph.call_function(aten.copy_.default, (buffers[name], value))
            copy.meta = {**value.meta, "val": buffers[name].meta["val"], ASSIGNS: True}
    return replace(exported, outputs=tuple(old.get(node, node) for node in exported.outputs), assigned=())


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
        changed += [self.env[source] for source in statistics(n)]
        if changed:
            self.changed[n] = frozenset(storage_of(tensor) for tensor in changed)
        return result


_KEY = "autoshard_flat"


def mark_flat(module: fx.GraphModule) -> None:
    """Mark a module whose graph is exported, or part of an exported one."""
    module.meta[_KEY] = True


def is_flat(module: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Return True if `flat_forward` takes the module."""
    return isinstance(module, fx.GraphModule) and _KEY in module.meta


def flat_forward(module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exported:
    """Return the forward graph of a flat fake copy, as `export_forward` does.

    Args:
        module: returns a tuple of tensors; its graph reads parameters, buffers and regions of the module.
        args: fake tensors for its first placeholders, in order.
        kwargs: fake tensors for placeholders by name.
    """
    names = named_tensors(module)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    graph = fx.Graph()
    held: dict[str, fx.Node] = {}
    inputs: list[ExportedInput] = []
    # Parameters and buffers become inputs, as torch.export makes them of other modules.
    for path, tensor in names.fakes.items():
        # With a prefix, since paths may begin with digits.
        held[path] = graph.placeholder(f"own_{path}".replace(".", "_"))
        held[path].meta["val"] = tensor
        inputs.append(ExportedInput("parameter" if path in parameters else "buffer", path, tensor, None))
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    call = call_layout(module, structure, leaves)
    placeholders = module.graph.find_nodes(op="placeholder")
    by_name = {node.target: node for node in placeholders}
    copies: dict[fx.Node, fx.Node] = {}
    passed = (*placeholders[: len(args)], *(by_name[name] for name in kwargs))
    for node, name, fake in zip(passed, call.leaves, leaves, strict=True):
        copies[node] = graph.node_copy(node)
        inputs.append(ExportedInput("input", str(name), fake, None))
    regions = nn.Module()  # the module of the new graph, whose parameters are inputs
    assigned: list[tuple[str, fx.Node]] = []
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target in names.first:
            copies[node] = held[names.first[target]]
        elif node.op == "get_attr":
            regions.add_module(target, module.get_submodule(target))
            copies[node] = graph.node_copy(node)
        elif ASSIGNS in node.meta:
            # A copy into a buffer, which `with_copies` made of an assignment: an assignment again.
            buffer, value = node.all_input_nodes
            assigned.append((names.first[str(buffer.target)], copies[value]))
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (returned,) = module.graph.output_node().args
    assert isinstance(returned, tuple)
    outputs = tuple(copies[node] for node in returned if isinstance(node, fx.Node))
    graph.output(outputs)
    results = pytree.tree_flatten(outputs)[1]
    layout = ResultLayout(results, tuple(result_names(results)), ())
    graph_module = fx.GraphModule(regions, graph)
    return Exported(graph_module, tuple(inputs), outputs, call, layout, names.aliases, assigned=tuple(assigned))
