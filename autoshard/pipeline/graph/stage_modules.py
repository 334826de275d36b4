"""`cut`: an exported module as one module per pipeline stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx, nn

from autoshard.capture._torch import is_persistent
from autoshard.capture.export import ExportedInput
from autoshard.capture.flat_modules import mark_flat
from autoshard.errors import CaptureError
from autoshard.pipeline.graph.crossing import recomputed_nodes, stages_of, values_across
from autoshard.pipeline.graph.forward_export import ExportedModule, is_cast
from autoshard.size import DynamicSize

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryTensor:
    """A tensor that one stage hands to the next.

    Attributes:
        name: of the node that makes it.
        like: a contiguous tensor on the meta device of its shape and dtype, that requires a gradient if its gradient
            is to be handed back. A tensor without dims goes as one of one element: captured by itself, a stage that
            returns a scalar would take it for its loss.
        sizes: its shape with `Size`s, if it has any.
    """

    name: str
    like: torch.Tensor
    sizes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, with dynamic sizes."""
        return self.sizes or tuple(self.like.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StageModule:
    """What one stage runs.

    Attributes:
        index: the stage, counted from 0.
        module: takes the tensors of `received` one by one, and those of `inputs` as keyword arguments; returns a tuple
            of the tensors of `passed`, or on the last stage of the model's outputs, in the order of its
            `ExportedModule.forward.result`. It holds the very parameters and buffers of the exported module that it
            reads, under all their names there. Whether the module was training or evaluating is part of the graph:
            `train()` and `eval()` do not change what a stage computes.
        received: what the stage before hands over, in order.
        inputs: inputs of the exported module by their names (such as `input_ids` or `batch['x']`): the keyword that
            `module` takes each under, and a tensor like it on the meta device.
        passed: what is handed to the next stage, in order; empty on the last.
        returned: tensors on the meta device like all that `module` returns.
        computed: names of the nodes that run here, among them those that are computed again.
        shared: parameters that other stages hold as well (tied ones), with all stages that do, in order: their
            gradients have to be added up over these.
    """

    index: int
    module: fx.GraphModule
    received: tuple[BoundaryTensor, ...]
    inputs: Mapping[str, tuple[str, torch.Tensor]]
    passed: tuple[BoundaryTensor, ...]
    returned: tuple[torch.Tensor, ...]
    computed: tuple[str, ...]
    shared: Mapping[str, tuple[int, ...]]

    @property
    def example(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Arguments and keyword arguments of a call of `module`, on the meta device, to plan it with."""
        return tuple(value.like for value in self.received), dict(self.inputs.values())

    @property
    def dynamic(self) -> dict[str, dict[int, sympy.Expr]]:
        """For what `module` takes, by the names that it has there, the dims that are dynamic sizes."""
        found: dict[str, dict[int, sympy.Expr]] = {}
        for node in self.module.graph.find_nodes(op="placeholder"):
            (shape,) = node.meta.get("sizes") or [()]
            dims = {dim: size.expr for dim, size in enumerate(shape) if isinstance(size, DynamicSize)}
            if dims:
                found[str(node.target)] = dims
        return found


def cut(
    exported: ExportedModule,
    stage_of: Mapping[str, int],
    stages: int,
    recompute: Mapping[str, Collection[int]] | None = None,
) -> list[StageModule]:
    """One module per stage, which together compute what the exported module does.

    A stage receives tensors from the stage before alone, as `torch.distributed.pipelining` sends them: a value used
    several stages later is handed on by those between. Inputs of the model go to every stage that reads them; outputs
    that are made before the last stage are handed on to it. A stage may have no operators, and then only hands on.

    Args:
        exported: the module's graph.
        stage_of: stage of every operator, `0 ... stages - 1`, by name of its node (`exported.operators`); a node that
            takes one of several results of an operator runs where the operator does, whatever is said of it.
        stages: how many there are.
        recompute: by name of a node, stages that do not receive its value from the stage before but, where they need
            it or hand it on, compute it anew, from inputs, buffers, and what they receive anyway.

    Returns:
        The stages, in order.

    Raises:
        PlanError: an operator has no stage, or one that does not exist; a value would go to an earlier stage; what has
            to stay together (`exported.together`) is on several stages; there are more stages than operators; nothing
            goes from a stage to the next; what is to be recomputed draws random numbers, is changed in place, or
            depends on parameters.

    Source: Rhino 5.1, for the stage of every operator.
    """
    recompute = recompute or {}
    placed = stages_of(exported, stage_of, stages, recompute)
    across = [*values_across(exported, placed, stages, recompute), ()]
    outputs = tuple(
        _meta_tensor(node.meta["val"], node.name in exported.differentiable) for node in exported.forward.outputs
    )
    parts = []
    for index in range(stages):
        returned = across[index + 1] if index + 1 < stages else exported.forward.outputs
        again = recomputed_nodes(exported, placed, index, across[index], returned)
        running = tuple(node for node, stage in placed.items() if stage == index or node in again)
        parts.append((running, _module(exported, index, running, across[index], returned)))
    holders: dict[str, list[int]] = {}
    for index, (_, module) in enumerate(parts):
        for name, _ in module.named_parameters():
            holders.setdefault(name, []).append(index)
    return [
        StageModule(
            index=index,
            module=module,
            received=_boundary_tensors(exported, across[index]),
            inputs=_inputs(exported, module.graph),
            passed=_boundary_tensors(exported, across[index + 1]),
            returned=tuple(value.like for value in _boundary_tensors(exported, across[index + 1])) or outputs,
            computed=tuple(node.name for node in running),
            shared={name: tuple(held) for name, held in holders.items() if len(held) > 1 and index in held},
        )
        for index, (running, module) in enumerate(parts)
    ]


def _boundary_tensors(exported: ExportedModule, nodes: Sequence[fx.Node]) -> tuple[BoundaryTensor, ...]:
    likes = (_meta_tensor(node.meta["val"], node.name in exported.differentiable) for node in nodes)
    return tuple(
        BoundaryTensor(
            node.name,
            like if like.ndim else _meta_tensor(like.new_empty(1), like.requires_grad),
            *node.meta.get("sizes", ()),
        )
        for node, like in zip(nodes, likes, strict=True)
    )


def _meta_tensor(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=requires_grad)


def _inputs(exported: ExportedModule, graph: fx.Graph) -> dict[str, tuple[str, torch.Tensor]]:
    """The model's inputs among the placeholders of a stage."""
    taken = {node.target for node in graph.find_nodes(op="placeholder")}
    return {
        source.name: (node.name, _meta_tensor(source.fake, source.fake.requires_grad))
        for node, source in exported.sources.items()
        if source.kind == "input" and node.name in taken
    }


def _module(
    exported: ExportedModule,
    index: int,
    running: Sequence[fx.Node],
    received: Sequence[fx.Node],
    returned: Sequence[fx.Node],
) -> fx.GraphModule:
    """A module that takes `received` and what it needs of the model's inputs, and returns `returned`.

    Args:
        exported: the whole graph, of which all nodes are.
        index: the stage, for the name of its class.
        running: the operators that it runs, in order.
        received, returned: what it takes from others and gives to others.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph(), f"{type(exported.module).__name__}Stage{index}")
    module.training = exported.module.training
    graph = fx.Graph()
    own: dict[fx.Node, fx.Node] = {node: _placeholder(graph, node) for node in received}
    read = {*returned}.union(*(node.all_input_nodes for node in running))
    for node, source in exported.sources.items():
        if node in read and source.kind == "input":
            own[node] = _placeholder(graph, node)
    own.update({node: _unpack(graph, node, own[node]) for node in received})
    for node, source in exported.sources.items():  # in the module's order: first names are first here, too
        if node in read and source.kind != "input":
            for name in exported.forward.aliases.get(source.name, (source.name,)):
                _register(module, name, exported.module, source)
            own[node] = _attribute(graph, node, source.name)
    for node in exported.graph.find_nodes(op="get_attr"):
        if node in read:  # a region under autocast or without gradients
            name = _free_name(module, str(node.target))
            module.add_module(name, exported.forward.graph_module.get_submodule(str(node.target)))
            own[node] = _attribute(graph, node, name)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    held = {node for node, source in exported.sources.items() if source.kind == "parameter"}
    for node in running:
        if is_cast(node) and node.all_input_nodes[0] in held:  # one serves all operators of a stage
            key = node.all_input_nodes[0], node.meta["val"].dtype
            own[node] = casts.get(key) or casts.setdefault(key, graph.node_copy(node, own.__getitem__))
        else:
            own[node] = graph.node_copy(node, own.__getitem__)
    if returned is not exported.forward.outputs:
        own.update({node: _pack(graph, node, own[node]) for node in returned})
    graph.output(tuple(own[node] for node in returned))
    graph.lint()
    module.graph = graph
    mark_flat(module)
    return module


def _pack(graph: fx.Graph, node: fx.Node, own: fx.Node) -> fx.Node:
    """What goes to the next stage of the value of `node`: contiguous, as it has to be to be sent."""
    tensor = node.meta["val"]
    if tensor.ndim:
        packed = graph.call_function(aten.contiguous.default, (own,))
    else:
        packed = graph.call_function(aten.unsqueeze.default, (own, 0))
    packed.meta["val"] = torch.empty(tensor.shape or (1,), dtype=tensor.dtype, device="meta")
    return packed


def _unpack(graph: fx.Graph, node: fx.Node, own: fx.Node) -> fx.Node:
    """The value of `node`, of what came from the stage before."""
    return own if node.meta["val"].ndim else graph.call_function(aten.squeeze.dim, (own, 0))


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    copy = graph.create_node("placeholder", node.name, name=node.name)
    copy.meta = dict(node.meta)
    return copy


def _attribute(graph: fx.Graph, node: fx.Node, path: str) -> fx.Node:
    copy = graph.create_node("get_attr", path, name=node.name)
    copy.meta = dict(node.meta)
    return copy


def _register(module: fx.GraphModule, path: str, whole: nn.Module, source: ExportedInput) -> None:
    """Register what `source` stands for in `module` under one of its names in the whole module.

    Constants become buffers that no `state_dict` has: a `GraphModule` keeps tensors in no other way.
    """
    *owners, name = path.split(".")
    first = (*owners, name)[0]
    if hasattr(fx.GraphModule, first):
        raise CaptureError(
            f"{source.kind} {path}: a stage of {type(whole).__name__} is a torch.fx.GraphModule, which has an "
            f"attribute `{first}` of its own. Give the model's another name."
        )
    owner: nn.Module = module
    for part in owners:
        if part not in dict(owner.named_children()):
            owner.add_module(part, nn.Module().train(module.training))
        owner = owner.get_submodule(part)
    if source.kind == "parameter":
        owner.register_parameter(name, whole.get_parameter(path))
    elif source.kind == "buffer":
        persistent = is_persistent(whole.get_submodule(".".join(owners)), name)
        owner.register_buffer(name, whole.get_buffer(path), persistent)
    else:
        value = source.value if source.value is not None else _meta_tensor(source.fake, False)
        owner.register_buffer(name, value, persistent=False)


def _free_name(module: nn.Module, name: str) -> str:
    while hasattr(module, name):
        name += "_"
    return name
