"""Reuse between stages that are equal but for names: of captured graphs, and of decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture._torch import pytree
from autoshard.capture.export import named_tensors
from autoshard.capture.joint_graph import JointGraph, fingerprint
from autoshard.capture.recomputation import copy_graph
from autoshard.patterns.decisions import Decisions
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.size import is_dynamic


def structural_text(stage: StageModule) -> str:
    """Return a text of everything but names that a capture of a stage depends on: equal texts mean equal captures.

    It has the operators with their arguments, parameters by their place, sizes, marks, and the tensors of the module in
    their order. Names of the model's inputs are in it, since they are keywords of a call.
    """
    module = stage.module
    names = named_tensors(module)
    place = {name: f"#{number}" for number, name in enumerate(names.fakes)}
    lines = [f"{module.training} {sorted(keyword for keyword, _ in stage.inputs.values())}"]
    lines += [f"{type(fake).__name__} {_sizes(fake)} {len(names.aliases[name])}" for name, fake in names.fakes.items()]
    number = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        called = node.target if node.op == "call_function" else ""
        if node.op == "get_attr":
            target = str(node.target)
            called = place[names.first[target]] if target in names.first else _region_text(module, target)
        arguments = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        leaves = pytree.tree_leaves((node.args, node.kwargs, node.meta.get("sizes")))
        dynamic = [leaf.expr for leaf in leaves if is_dynamic(leaf)]
        lines.append(
            f"{node.op} {called} {arguments} {_sizes(node.meta.get('val'))} {dynamic} {node.meta.get('custom')}"
        )
    return "\n".join(lines)


def _region_text(module: fx.GraphModule, target: str) -> str:
    """Return the text of a graph within the graph, which has no parameters; of anything else, its name."""
    region = module.get_submodule(target)
    return str(region.graph) if isinstance(region, fx.GraphModule) else target


def _sizes(value: object) -> list[tuple[object, ...]]:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad) for tensor in tensors]


def has_same_names(first: StageModule, second: StageModule) -> bool:
    """Return True if two stages of one text have the same names, and their nodes the same modules."""
    nodes = zip(first.module.graph.nodes, second.module.graph.nodes, strict=True)
    return list(first.module.state_dict()) == list(second.module.state_dict()) and all(
        (node.name, _module_path(node)) == (like.name, _module_path(like)) for node, like in nodes
    )


def rename_capture(graph: JointGraph, source: StageModule, target: StageModule) -> JointGraph | None:
    """Rename the captured step of one stage to that of another.

    Args:
        graph: the captured step of `source`.
        source: the captured stage.
        target: the other stage, with the same `structural_text`.

    Returns:
        The capture of the other stage: the same nodes, with its names and modules. None if modules do not correspond
        one to one.
    """
    paths = _module_paths(source, target)
    if paths is None:
        return None
    names = dict(_name_pairs(graph, source, target))
    copy, _ = copy_graph(graph)
    for node in copy.graph.nodes:
        path = node.meta.get("module_path", "")
        if path not in paths:
            return None
        node.meta["module_path"] = paths[path]
    inputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.inputs)
    outputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.outputs)
    dynamic = graph.dynamic
    if dynamic is not None:
        dynamic = replace(dynamic, dims={names.get(name, name): dims for name, dims in dynamic.dims.items()})
    leaves = tuple(names.get(leaf, leaf) if isinstance(leaf, str) else leaf for leaf in graph.call.leaves)
    return replace(
        copy,
        inputs=inputs,
        outputs=outputs,
        aliases=dict(named_tensors(target.module).aliases),
        call=replace(graph.call, leaves=leaves),
        dynamic=dynamic,
        fingerprint=fingerprint(inputs, outputs, copy.graph),
    )


def _name_pairs(graph: JointGraph, source: StageModule, target: StageModule) -> Iterator[tuple[str, str]]:
    """Yield the names of the tensors that a stage holds and receives, with those of the other stage."""
    yield from zip(named_tensors(source.module).fakes, named_tensors(target.module).fakes, strict=True)
    leaves = [leaf for leaf in graph.call.leaves if isinstance(leaf, str)]
    yield from zip(leaves, (value.name for value in target.received), strict=False)  # received ones come first


def _module_paths(source: StageModule, target: StageModule) -> dict[str, str] | None:
    """Return the path of every module of a stage, with that in the other; None where one would have two."""
    paths = {"": ""}
    for node, like in zip(source.module.graph.nodes, target.module.graph.nodes, strict=True):
        if paths.setdefault(_module_path(node), _module_path(like)) != _module_path(like):
            return None
    return paths


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def structural_fingerprint(graph: JointGraph) -> str:
    """Return a hash that is equal for graphs which differ only in the names of parameters, buffers and inputs."""
    number = {item.name: str(place) for place, item in enumerate(graph.inputs)}
    inputs = [replace(item, name=number[item.name]) for item in graph.inputs]
    outputs = [replace(item, name=number.get(item.name, item.name), tangent=None) for item in graph.outputs]
    return fingerprint(inputs, outputs, graph.graph)


def task_graph_marks(graph: JointGraph) -> tuple[tuple[str, int] | None, ...]:
    """Return the primitive of every operator, and the number of its task graph in the order in which they occur."""
    task_graphs = [graph.task_graph(node) for node in graph.graph.nodes]
    number = {task_graph: place for place, task_graph in enumerate(dict.fromkeys(task_graphs))}
    return tuple(None if mark is None else (str(mark.primitive), number[mark]) for mark in task_graphs)


def rename_decisions(decisions: Decisions, source: JointGraph, target: JointGraph) -> Decisions:
    """Rename the decisions for one graph to those for another of the same `structural_fingerprint`."""
    nodes = {node.name: like.name for node, like in zip(source.graph.nodes, target.graph.nodes, strict=True)}
    outputs = {output.name: like.name for output, like in zip(source.outputs, target.outputs, strict=True)}
    return Decisions(
        choices={nodes[name]: choices for name, choices in decisions.choices.items()},
        rest={nodes[name]: spec for name, spec in decisions.rest.items()},
        outputs={outputs[name]: spec for name, spec in decisions.outputs.items()},
        hubs={_rename_hub(key, nodes): spec for key, spec in decisions.hubs.items()},
    )


def _rename_hub(key: str, nodes: Mapping[str, str]) -> str:
    # A hub's key is "node@phase" or, for one of several results, "node:index@phase".
    value, at, phase = key.partition("@")
    node, colon, index = value.partition(":")
    return f"{nodes[node]}{colon}{index}{at}{phase}"
