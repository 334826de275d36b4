"""Modules that are flat graphs of operators already: they need no export, which would find the same graph again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import fx, nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import ResultLayout, call_layout, result_names
from autoshard.capture.export import ASSIGNS, Exported, ExportedInput, named_tensors

_KEY = "autoshard_flat"


def mark_flat(module: fx.GraphModule) -> None:
    """Say that the graph of a module was exported, or is a part of one that was."""
    module.meta[_KEY] = True


def is_flat(module: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Whether `flat_forward` takes the module."""
    return isinstance(module, fx.GraphModule) and _KEY in module.meta


def flat_forward(twin: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exported:
    """The forward graph of a flat fake twin, as `export_forward` gives it.

    Args:
        twin: returns a tuple of tensors; what its graph reads of its own are parameters, buffers and regions.
        args, kwargs: fake tensors: positional ones for its first placeholders in order, the others by their names.
    """
    names = named_tensors(twin)
    parameters = {name for name, _ in twin.named_parameters(remove_duplicate=False)}
    graph = fx.Graph()
    own: dict[str, fx.Node] = {}
    inputs: list[ExportedInput] = []
    for path, tensor in names.fakes.items():
        own[path] = graph.placeholder(f"own_{path}".replace(".", "_"))  # paths may begin with digits
        own[path].meta["val"] = tensor
        inputs.append(ExportedInput("parameter" if path in parameters else "buffer", path, tensor, None))
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    call = call_layout(twin, structure, leaves)
    taken = twin.graph.find_nodes(op="placeholder")
    named = {node.target: node for node in taken}
    env: dict[fx.Node, fx.Node] = {}
    given = (*taken[: len(args)], *(named[name] for name in kwargs))
    for node, name, fake in zip(given, call.leaves, leaves, strict=True):
        env[node] = graph.node_copy(node)
        inputs.append(ExportedInput("input", str(name), fake, None))
    regions = nn.Module()
    assigned: list[tuple[str, fx.Node]] = []
    for node in twin.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr" and target in names.first:
            env[node] = own[names.first[target]]
        elif node.op == "get_attr":
            regions.add_module(target, twin.get_submodule(target))
            env[node] = graph.node_copy(node)
        elif ASSIGNS in node.meta:
            buffer, value = node.all_input_nodes
            assigned.append((names.first[str(buffer.target)], env[value]))
        elif node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
    (returned,) = twin.graph.output_node().args
    assert isinstance(returned, tuple)
    outputs = tuple(env[node] for node in returned if isinstance(node, fx.Node))
    graph.output(outputs)
    results = pytree.tree_flatten(outputs)[1]
    layout = ResultLayout(results, tuple(result_names(results)), ())
    graph_module = fx.GraphModule(regions, graph)
    return Exported(graph_module, tuple(inputs), outputs, call, layout, names.aliases, assigned=tuple(assigned))
