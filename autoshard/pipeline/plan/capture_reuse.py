"""One capture for stages that are alike but for names: the graph of one, with the names of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import Constant
from autoshard.capture.dynamic import DynamicSizes
from autoshard.capture.export import named_tensors
from autoshard.capture.fingerprint import fingerprint
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.recomputation import copy_graph
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.size import is_dynamic


def structural_text(stage: StageModule) -> str:
    """All that a capture of a stage depends on but names: two stages that have the same text are alike.

    Operators with their arguments, what they read by its place, sizes, marks, and which tensors the module holds, in
    their order. Names of the model's inputs count, since a call says them.
    """
    module = stage.module
    names = named_tensors(module)
    place = {name: f"#{number}" for number, name in enumerate(names.fakes)}
    lines = [f"{module.training} {sorted(keyword for keyword, _ in stage.inputs.values())}"]
    lines += [f"{type(one).__name__} {_sizes(one)} {len(names.aliases[name])}" for name, one in names.fakes.items()]
    number = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        called = node.target if node.op == "call_function" else ""
        if node.op == "get_attr":
            target = str(node.target)
            called = place[names.first[target]] if target in names.first else _region_text(module, target)
        arguments = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        dynamic = [
            one.expr for one in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("sizes"))) if is_dynamic(one)
        ]
        lines.append(
            f"{node.op} {called} {arguments} {_sizes(node.meta.get('val'))} {dynamic} {node.meta.get('custom')}"
        )
    return "\n".join(lines)


def _region_text(module: fx.GraphModule, target: str) -> str:
    """A graph within the graph, which has no parameters of its own; what else it may be is told by its name."""
    region = module.get_submodule(target)
    return str(region.graph) if isinstance(region, fx.GraphModule) else target


def _sizes(value: object) -> list[tuple[object, ...]]:
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return [(tuple(one.shape), tuple(one.stride()), one.dtype, one.requires_grad) for one in tensors]


def has_same_names(one: StageModule, other: StageModule) -> bool:
    """Whether two stages that are alike have the same names, and their nodes the same modules."""
    nodes = zip(one.module.graph.nodes, other.module.graph.nodes, strict=True)
    return list(one.module.state_dict()) == list(other.module.state_dict()) and all(
        (node.name, _module_path(node)) == (like.name, _module_path(like)) for node, like in nodes
    )


def rename_capture(graph: JointGraph, made: StageModule, wanted: StageModule) -> JointGraph | None:
    """The captured step of a stage as that of another one that is alike.

    Args:
        graph: of the step.
        made: the stage that it was captured of.
        wanted: the other stage, of the same `structural_text`.

    Returns:
        What a capture of the other stage would give: the same nodes, with the names and the modules of the other
        stage. None where modules do not correspond one by one.
    """
    paths = _module_paths(made, wanted)
    if paths is None:
        return None
    names = dict(_name_pairs(graph, made, wanted))
    copy, _ = copy_graph(graph)
    for node in copy.graph.nodes:
        path = node.meta.get("module_path", "")
        if path not in paths:
            return None
        node.meta["module_path"] = paths[path]
    inputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.inputs)
    outputs = tuple(replace(item, name=names.get(item.name, item.name)) for item in copy.outputs)
    return replace(
        copy,
        inputs=inputs,
        outputs=outputs,
        aliases=dict(named_tensors(wanted.module).aliases),
        call=replace(graph.call, leaves=tuple(_rename_leaf(leaf, names) for leaf in graph.call.leaves)),
        dynamic=None if graph.dynamic is None else _rename_dynamic_sizes(graph.dynamic, names),
        fingerprint=fingerprint(inputs, outputs, copy.graph),
    )


def _rename_dynamic_sizes(sizes: DynamicSizes, names: Mapping[str, str]) -> DynamicSizes:
    return replace(sizes, dims={names.get(name, name): dims for name, dims in sizes.dims.items()})


def _rename_leaf(leaf: str | Constant, names: Mapping[str, str]) -> str | Constant:
    return names.get(leaf, leaf) if isinstance(leaf, str) else leaf


def _name_pairs(graph: JointGraph, made: StageModule, wanted: StageModule) -> Iterator[tuple[str, str]]:
    """Names of what a stage holds and receives, with those of the other one."""
    yield from zip(named_tensors(made.module).fakes, named_tensors(wanted.module).fakes, strict=True)
    received = [leaf for leaf in graph.call.leaves if isinstance(leaf, str)]
    yield from zip(received, (value.name for value in wanted.received), strict=False)


def _module_paths(made: StageModule, wanted: StageModule) -> dict[str, str] | None:
    """The path of every module of a stage, and that of its like; None where one would have two."""
    found = {"": ""}
    for one, other in zip(made.module.graph.nodes, wanted.module.graph.nodes, strict=True):
        path, like = _module_path(one), _module_path(other)
        if found.setdefault(path, like) != like:
            return None
    return found


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""
