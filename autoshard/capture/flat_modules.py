"""Modules that are flat graphs of operators already, and so need no export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import fx, nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import ResultLayout, call_layout, result_names
from autoshard.capture.export import ASSIGNS, Exported, ExportedInput, named_tensors

_KEY = "autoshard_flat"


def mark_flat(module: fx.GraphModule) -> None:
    """Mark a module whose graph is exported, or part of an exported one."""
    module.meta[_KEY] = True


def is_flat(module: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Return True if `flat_forward` takes the module."""
    return isinstance(module, fx.GraphModule) and _KEY in module.meta


def flat_forward(twin: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exported:
    """Return the forward graph of a flat fake copy, as `export_forward` does.

    Args:
        twin: returns a tuple of tensors; its graph reads parameters, buffers and regions of the module.
        args: fake tensors for its first placeholders, in order.
        kwargs: fake tensors for placeholders by name.
    """
    names = named_tensors(twin)
    parameters = {name for name, _ in twin.named_parameters(remove_duplicate=False)}
    graph = fx.Graph()
    held: dict[str, fx.Node] = {}
    inputs: list[ExportedInput] = []
    for path, tensor in names.fakes.items():
        # With a prefix, since paths may begin with digits.
        held[path] = graph.placeholder(f"own_{path}".replace(".", "_"))
        held[path].meta["val"] = tensor
        inputs.append(ExportedInput("parameter" if path in parameters else "buffer", path, tensor, None))
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    call = call_layout(twin, structure, leaves)
    placeholders = twin.graph.find_nodes(op="placeholder")
    by_name = {node.target: node for node in placeholders}
    copies: dict[fx.Node, fx.Node] = {}
    passed = (*placeholders[: len(args)], *(by_name[name] for name in kwargs))
    for node, name, fake in zip(passed, call.leaves, leaves, strict=True):
        copies[node] = graph.node_copy(node)
        inputs.append(ExportedInput("input", str(name), fake, None))
    regions = nn.Module()  # the module of the new graph, whose parameters are inputs
    assigned: list[tuple[str, fx.Node]] = []
    for node in twin.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target in names.first:
            copies[node] = held[names.first[target]]
        elif node.op == "get_attr":
            regions.add_module(target, twin.get_submodule(target))
            copies[node] = graph.node_copy(node)
        elif ASSIGNS in node.meta:
            # A copy into a buffer, which `with_copies` made of an assignment: an assignment again.
            buffer, value = node.all_input_nodes
            assigned.append((names.first[str(buffer.target)], copies[value]))
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    (returned,) = twin.graph.output_node().args
    assert isinstance(returned, tuple)
    outputs = tuple(copies[node] for node in returned if isinstance(node, fx.Node))
    graph.output(outputs)
    results = pytree.tree_flatten(outputs)[1]
    layout = ResultLayout(results, tuple(result_names(results)), ())
    graph_module = fx.GraphModule(regions, graph)
    return Exported(graph_module, tuple(inputs), outputs, call, layout, names.aliases, assigned=tuple(assigned))
