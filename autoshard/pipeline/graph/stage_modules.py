"""`cut`: one module per pipeline stage of an exported module.

Checks of the arguments of a cut come first, then the values that cross its boundaries, and the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx, nn

from autoshard.capture._torch import is_persistent
from autoshard.capture.export import ExportedInput
from autoshard.capture.flat_modules import mark_flat
from autoshard.errors import CaptureError, PlanError
from autoshard.pipeline.graph.forward_export import ExportedModule, is_cast, is_part
from autoshard.size import DynamicSize

aten = torch.ops.aten

Recompute = Mapping[str, Collection[int]]


def stages_of(
    exported: ExportedModule, stage_of: Mapping[str, int], stages: int, recompute: Recompute
) -> dict[fx.Node, int]:
    """Return the stage of every operator, in the order of the graph; parts of a result are where the operator is.

    Raises:
        PlanError: as for `cut`.
    """
    operators = exported.operators
    if stages < 1 or stages > len(operators):
        raise PlanError(
            f"stages={stages}: {type(exported.module).__name__} has {len(operators)} operators, and every stage but "
            "those that hand on what they receive needs one. Ask for fewer stages."
        )
    _check_names(exported, stage_of, stages, recompute)
    placed: dict[fx.Node, int] = {}
    for node in operators:
        placed[node] = placed[node.all_input_nodes[0]] if is_part(node) else stage_of[node.name]
        for source in node.all_input_nodes:
            if placed.get(source, 0) > placed[node]:
                raise PlanError(
                    f"{node.name} is on stage {placed[node]} and takes the result of {source.name} on stage "
                    f"{placed[source]}: values go forward only. Put {node.name} on stage {placed[source]} or later."
                )
    by_name = {node.name: stage for node, stage in placed.items()}
    for group in exported.together:
        placements = {by_name[name]: name for name in reversed(group)}
        if len(placements) > 1:
            listed = ", ".join(f"{name} on stage {stage}" for stage, name in sorted(placements.items()))
            raise PlanError(
                f"{listed}: they read or change the same tensor, which is changed in place, and so must be on one "
                f"stage, with all of {', '.join(group[:8])}{', ...' if len(group) > 8 else ''}. Put them together, or "
                "use operators that do not work in place (ReLU without inplace=True)."
            )
    return placed


def _check_names(exported: ExportedModule, stage_of: Mapping[str, int], stages: int, recompute: Recompute) -> None:
    names = {node.name for node in exported.operators}
    missing = [node.name for node in exported.operators if node.name not in stage_of and not is_part(node)]
    if missing:
        raise PlanError(
            f"{len(missing)} of {len(names)} operators have no stage, such as {missing[0]}: stage_of needs one for "
            "every node of exported.operators."
        )
    for argument, mentioned in (("stage_of", stage_of), ("recompute", recompute)):
        unknown = [name for name in mentioned if name not in names]
        if unknown:
            raise PlanError(
                f"{argument} names {unknown[0]}, which is no operator of {type(exported.module).__name__}: was it made "
                "for another export?"
            )
    outside = [name for name, stage in stage_of.items() if stage not in range(stages)]
    if outside:
        name = outside[0]
        raise PlanError(f"{name} is on stage {stage_of[name]}: with stages={stages} there are 0 to {stages - 1}.")


def values_across(
    exported: ExportedModule, placed: Mapping[fx.Node, int], stages: int, recompute: Recompute
) -> list[tuple[fx.Node, ...]]:
    """Return the values that every stage receives from the one before, in the order of the graph.

    Args:
        exported, stages, recompute: as for `cut`.
        placed: the stage of every operator.

    Raises:
        PlanError: nothing goes from a stage to the next.
    """
    has: list[set[fx.Node]] = [set() for _ in range(stages)]
    for node, stage in placed.items():
        has[stage].update(node.all_input_nodes)
    has[-1].update(exported.forward.outputs)
    received: list[tuple[fx.Node, ...]] = [()] * stages
    # From the last stage backwards: a stage has what it reads and what the next one receives, and receives what it has
    # and does not make.
    for stage in range(stages - 1, 0, -1):
        received[stage] = tuple(
            node
            for node, place in placed.items()
            if node in has[stage] and place < stage and stage not in recompute.get(node.name, ())
        )
        has[stage - 1].update(received[stage])
    _check_across(placed, received)
    return received


def _check_across(placed: Mapping[fx.Node, int], received: Sequence[Sequence[fx.Node]]) -> None:
    counts = Counter(placed.values())
    for stage, nodes in enumerate(received[1:], 1):
        if not nodes:
            raise PlanError(
                f"nothing goes from stage {stage - 1} ({counts[stage - 1]} operators) to stage {stage} "
                f"({counts[stage]} operators), so they are no pipeline. Put some of the operators that lead to the "
                f"model's outputs on stage {stage - 1} or before."
            )
        for node in nodes:
            if not isinstance(node.meta["val"], torch.Tensor):
                raise PlanError(
                    f"{node.name} would go from stage {stage - 1} to stage {stage} and is no tensor but "
                    f"{type(node.meta['val']).__name__}. Put it on the stage of what takes it."
                )


def recomputed_nodes(
    exported: ExportedModule,
    placed: Mapping[fx.Node, int],
    stage: int,
    received: Collection[fx.Node],
    returned: Collection[fx.Node],
) -> set[fx.Node]:
    """Return the operators of earlier stages that a stage runs anew, for values that it needs and does not receive.

    Args:
        exported: as for `cut`.
        placed: the stage of every operator.
        stage: the stage.
        received, returned: the values that it takes from others and gives to others.

    Raises:
        PlanError: one of them must not be run again.
    """
    operators = [node for node, place in placed.items() if place == stage]
    given = {*received, *operators}
    needed = [*(source for node in operators for source in node.all_input_nodes), *returned]
    # For every node that runs anew, a value that needs it.
    wanted_for = {node: node for node in needed if node in placed and node not in given}
    waiting = list(wanted_for)
    # The list grows while it is walked.
    for node in waiting:
        _check_recomputable(exported, node, wanted_for[node], stage)
        for source in node.all_input_nodes:
            if source in placed and source not in given and source not in wanted_for:
                wanted_for[source] = wanted_for[node]
                waiting.append(source)
    return set(waiting)


def _check_recomputable(exported: ExportedModule, node: fx.Node, wanted: fx.Node, stage: int) -> None:
    """Refuse to run `node` anew for `wanted` if its result there would differ, or be unavailable."""
    fault = None
    if node.name in exported.random:
        fault = "may draw random numbers, which would be others"
    elif any(node.name in group for group in exported.together):
        fault = "is changed in place, or made of what is"
    else:
        sources = exported.sources
        for source in node.all_input_nodes:
            if source in sources and sources[source].kind == "parameter":
                fault = f"depends on parameter {sources[source].name}, which that stage would have to hold"
    if fault:
        of = "" if node is wanted else f" is made from {node.name}, which"
        raise PlanError(
            f"recompute says that stage {stage} computes {wanted.name} anew, but it{of} {fault}. Leave "
            f"{stage} out of recompute[{wanted.name!r}]: the value is handed on then."
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryTensor:
    """A tensor that one stage hands to the next.

    Attributes:
        name: of the node that makes it.
        like: a contiguous tensor on the meta device of its shape and dtype; it requires a gradient if its gradient is
            handed back. A tensor without dims is sent as one of one element: a captured stage that returned a scalar
            would take it for its loss.
        sizes: its shape with dynamic sizes, if it has any.
    """

    name: str
    like: torch.Tensor
    sizes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with dynamic sizes."""
        return self.sizes or tuple(self.like.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StageModule:
    """The module of one stage, and its inputs and outputs.

    Attributes:
        index: the stage, counted from 0.
        module: takes the tensors of `received` one by one, and those of `inputs` as keyword arguments; returns a tuple
            of the tensors of `passed`, or on the last stage of the model's outputs, in the order of its
            `ExportedModule.forward.result`. It holds the parameters and buffers of the exported module that it reads
            themselves, under all their names there. Training or evaluation mode is part of the graph: `train()` and
            `eval()` do not change it.
        received: tensors from the stage before, in order.
        inputs: inputs of the exported module by their names (such as `input_ids` or `batch['x']`): the keyword of
            `module` for each, and a tensor like it on the meta device.
        passed: tensors for the next stage, in order; empty on the last.
        returned: tensors on the meta device like all that `module` returns.
        shared: parameters that other stages hold as well (tied ones), with all stages that do, in order: their
            gradients have to be added up over these.
    """

    index: int
    module: fx.GraphModule
    received: tuple[BoundaryTensor, ...]
    inputs: Mapping[str, tuple[str, torch.Tensor]]
    passed: tuple[BoundaryTensor, ...]
    returned: tuple[torch.Tensor, ...]
    shared: Mapping[str, tuple[int, ...]]

    @property
    def example(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Arguments and keyword arguments of a call of `module`, on the meta device."""
        return tuple(value.like for value in self.received), dict(self.inputs.values())

    @property
    def dynamic(self) -> dict[str, dict[int, sympy.Expr]]:
        """For every input of `module` by its name there, the dims that are dynamic sizes."""
        dynamic: dict[str, dict[int, sympy.Expr]] = {}
        for node in self.module.graph.find_nodes(op="placeholder"):
            (shape,) = node.meta.get("sizes") or [()]
            dims = {dim: size.expr for dim, size in enumerate(shape) if isinstance(size, DynamicSize)}
            if dims:
                dynamic[str(node.target)] = dims
        return dynamic


def cut(
    exported: ExportedModule,
    stage_of: Mapping[str, int],
    stages: int,
    recompute: Mapping[str, Collection[int]] | None = None,
) -> list[StageModule]:
    """Cut an exported module into one module per stage.

    A stage receives tensors only from the stage before, as `torch.distributed.pipelining` sends them: stages in between
    hand a value on. Inputs of the model go to every stage that reads them; outputs of earlier stages are handed on to
    the last. A stage without operators only hands on.

    Args:
        exported: the module's graph.
        stage_of: stage of every operator, `0 ... stages - 1`, by name of its node (`exported.operators`); a node that
            takes one of several results of an operator always runs where the operator does.
        stages: number of stages.
        recompute: by name of a node, the stages that compute its value anew, from inputs, buffers and received values,
            instead of receiving it.

    Returns:
        The stages, in order.

    Raises:
        PlanError: an operator has no stage, or one that does not exist; a value would go to an earlier stage; operators
            that must stay together (`exported.together`) are on several stages; there are more stages than operators;
            a stage receives nothing; a recomputed value draws random numbers, is changed in place, or depends on
            parameters.

    Source: Rhino 5.1, for the stage of every operator.
    """
    recompute = recompute or {}
    placed = stages_of(exported, stage_of, stages, recompute)
    # The empty tuple is what the last stage passes on: nothing.
    across = [*values_across(exported, placed, stages, recompute), ()]
    outputs = tuple(
        _meta_tensor(node.meta["val"], node.name in exported.differentiable) for node in exported.forward.outputs
    )
    modules = []
    for index in range(stages):
        returned = across[index + 1] if index + 1 < stages else exported.forward.outputs
        again = recomputed_nodes(exported, placed, index, across[index], returned)
        running = tuple(node for node, stage in placed.items() if stage == index or node in again)
        modules.append(_module(exported, index, running, across[index], returned))
    holders: dict[str, list[int]] = {}
    for index, module in enumerate(modules):
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
            shared={name: tuple(held) for name, held in holders.items() if len(held) > 1 and index in held},
        )
        for index, module in enumerate(modules)
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
    """Return the model's inputs among the placeholders of a stage."""
    placeholders = {node.target for node in graph.find_nodes(op="placeholder")}
    return {
        source.name: (node.name, _meta_tensor(source.fake, source.fake.requires_grad))
        for node, source in exported.sources.items()
        if source.kind == "input" and node.name in placeholders
    }


def _module(
    exported: ExportedModule,
    index: int,
    running: Sequence[fx.Node],
    received: Sequence[fx.Node],
    returned: Sequence[fx.Node],
) -> fx.GraphModule:
    """Build the module of stage `index`, which runs the operators `running` on `received` and the model's inputs."""
    # The graph is set last: a GraphModule is made with what its graph reads from its root, and the root is empty here.
    module = fx.GraphModule(nn.Module(), fx.Graph(), f"{type(exported.module).__name__}Stage{index}")
    module.training = exported.module.training
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {node: _copy_node(graph, node, "placeholder", node.name) for node in received}
    read = {*returned}.union(*(node.all_input_nodes for node in running))
    for node, source in exported.sources.items():
        if node in read and source.kind == "input":
            copies[node] = _copy_node(graph, node, "placeholder", node.name)
    # A tensor without dims is sent as one of one element.
    for node in received:
        if not node.meta["val"].ndim:
            copies[node] = graph.call_function(aten.squeeze.dim, (copies[node], 0))
    # In the module's order, so that the first name of a tied tensor there is its first name here, too.
    for node, source in exported.sources.items():
        if node in read and source.kind != "input":
            for name in exported.forward.aliases.get(source.name, (source.name,)):
                _register(module, name, exported.module, source)
            copies[node] = _copy_node(graph, node, "get_attr", source.name)
    # Graphs within the graph: regions under autocast or without gradients. Their names may be those of parameters.
    for node in exported.graph.find_nodes(op="get_attr"):
        if node in read:
            name = str(node.target)
            while hasattr(module, name):
                name += "_"
            module.add_module(name, exported.forward.graph_module.get_submodule(str(node.target)))
            copies[node] = _copy_node(graph, node, "get_attr", name)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    held = {node for node, source in exported.sources.items() if source.kind == "parameter"}
    for node in running:
        # Every operator has a cast of its own for each parameter; one per stage and dtype is enough.
        if is_cast(node) and node.all_input_nodes[0] in held:
            cast = node.all_input_nodes[0], node.meta["val"].dtype
            copies[node] = casts.get(cast) or casts.setdefault(cast, graph.node_copy(node, copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if returned is not exported.forward.outputs:
        # Only between stages: the model's outputs stay as they are.
        copies.update({node: _pack(graph, node, copies[node]) for node in returned})
    graph.output(tuple(copies[node] for node in returned))
    graph.lint()
    module.graph = graph
    mark_flat(module)
    return module


def _pack(graph: fx.Graph, node: fx.Node, copy: fx.Node) -> fx.Node:
    """Make the value of `node` ready to be sent: contiguous, with at least one dim."""
    tensor = node.meta["val"]
    if tensor.ndim:
        packed = graph.call_function(aten.contiguous.default, (copy,))
    else:
        packed = graph.call_function(aten.unsqueeze.default, (copy, 0))
    packed.meta["val"] = torch.empty(tensor.shape or (1,), dtype=tensor.dtype, device="meta")
    return packed


def _copy_node(graph: fx.Graph, node: fx.Node, op: str, target: str) -> fx.Node:
    copy = graph.create_node(op, target, name=node.name)
    copy.meta = dict(node.meta)
    return copy


def _register(module: fx.GraphModule, path: str, whole: nn.Module, source: ExportedInput) -> None:
    """Register the tensor of `source` in `module`, under one of its names in the whole module."""
    # A tensor called `graph` or `code` would hide what torch needs to run the module.
    first = path.partition(".")[0]
    if hasattr(fx.GraphModule, first):
        raise CaptureError(
            f"{source.kind} {path}: a stage of {type(whole).__name__} is a torch.fx.GraphModule, which has an "
            f"attribute `{first}` of its own. Give the model's another name."
        )
    owner, name = owner_of(module, path)
    if source.kind == "parameter":
        owner.register_parameter(name, whole.get_parameter(path))
    elif source.kind == "buffer":
        persistent = is_persistent(whole.get_submodule(path.rpartition(".")[0]), name)
        owner.register_buffer(name, whole.get_buffer(path), persistent)
    else:
        # A constant: a GraphModule keeps tensors in no other way than as buffers.
        value = source.value if source.value is not None else _meta_tensor(source.fake, False)
        owner.register_buffer(name, value, persistent=False)


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor of a path, created if necessary, and the tensor's name there."""
    *parts, name = path.split(".")
    owner = module
    for part in parts:
        if part not in owner._modules:
            owner.add_module(part, nn.Module().train(module.training))
        owner = owner.get_submodule(part)
    return owner, name
