"""`cut`: the steps of the stages of a pipeline, as slices of the step of the whole module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import Any

import sympy
import torch
from torch import fx, nn

from autoshard.capture._torch import FakeTensor, is_persistent, pytree
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.call_layout import ResultLayout, call_layout, result_names
from autoshard.capture.describe import simplify_step
from autoshard.capture.joint_graph import JointGraph, JointInput, JointOutput
from autoshard.capture.output_history import OutputHistories
from autoshard.capture.step_marks import tensor_name, value_number
from autoshard.errors import PipelineError
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep, addends
from autoshard.pipeline.graph.stage_cut import Recompute, StageCut, stages_of
from autoshard.size import DynamicSize, plain

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class BoundaryTensor:
    """A tensor that one stage hands to the next.

    Attributes:
        name: of the tensor in the forward graph.
        like: a contiguous tensor on the meta device of its shape and dtype; it requires a gradient if its gradient is
            handed back.
        sizes: its shape with dynamic sizes, if it has any.
    """

    name: str
    like: torch.Tensor
    sizes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with dynamic sizes."""
        return self.sizes or tuple(self.like.shape)


@dataclass(frozen=True, eq=False)
class StageModule:
    """The step of one stage, and its inputs and outputs.

    Attributes:
        index: the stage, counted from 0.
        module: holds the parameters and buffers of the whole module that the stage reads themselves, under all their
            names there. Its `forward`, which has the arguments of the stage, can't be called: programs of the step run.
            It takes the tensors of `received` one by one, and those of `inputs` as keyword arguments; the step returns
            a tuple of the tensors of `passed`, or on the last stage of the whole module's outputs, in their order.
        received: tensors from the stage before, in order.
        inputs: inputs of the whole module by their names (such as `input_ids` or `batch['x']`): the keyword of `module`
            for each, and a tensor like it on the meta device.
        passed: tensors for the next stage, in order; empty on the last.
        returned: tensors on the meta device like all that the step returns.
        shared: parameters that other stages hold as well (tied ones), with all stages that do, in order: their
            gradients have to be added up over these.
        step: of the stage, simplified. Training or evaluation mode is part of it.
    """

    index: int
    module: nn.Module
    received: tuple[BoundaryTensor, ...]
    inputs: Mapping[str, tuple[str, torch.Tensor]]
    passed: tuple[BoundaryTensor, ...]
    returned: tuple[torch.Tensor, ...]
    shared: Mapping[str, tuple[int, ...]]
    step: JointGraph

    @property
    def example(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Arguments and keyword arguments of a call of `module`, on the meta device."""
        return tuple(value.like for value in self.received), dict(self.inputs.values())

    @property
    def dynamic(self) -> Mapping[str, Mapping[int, sympy.Expr]]:
        """For every input of `module` by its name there, the dims that are dynamic sizes."""
        return {} if self.step.dynamic is None else self.step.dynamic.dims


def cut(
    step: MicrobatchStep,
    stage_of: Mapping[str, int],
    stages: int,
    recompute: Recompute | None = None,
    *,
    grad: bool = True,
) -> list[StageModule]:
    """Cut a step into one step per stage.

    A stage receives tensors only from the stage before, as `torch.distributed.pipelining` sends them: stages in between
    hand a value on. Inputs of the model go to every stage that reads them; outputs of earlier stages are handed on to
    the last. A stage without operators only hands on. Its gradients go back the same way: a stage adds up what its
    operators and the stages behind it contribute to that of a tensor.

    Args:
        step: of the whole module.
        stage_of: stage of every operator, `0 ... stages - 1`, by name.
        stages: number of stages.
        recompute: by name of a tensor, the stages that compute it anew, from inputs, buffers and received values,
            instead of receiving it.
        grad: False for the forward half alone.

    Returns:
        The stages, in order.

    Raises:
        PlanError: an operator has no stage, or one that does not exist; a value would go to an earlier stage; operators
            that must stay together (`step.together`) are on several stages; there are more stages than operators; a
            stage receives nothing; a recomputed value draws random numbers, is changed in place, or depends on
            parameters.

    Source: Rhino 5.1, for the stage of every operator.
    """
    where = StageCut(step, stages_of(step, stage_of, stages, recompute or {}), stages, recompute or {}, grad)
    parts = [_slice(where, stage) for stage in range(stages)]
    holders: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        for name, _ in part.module.named_parameters():
            holders.setdefault(name, []).append(index)
    return [
        replace(
            part,
            index=index,
            shared={name: tuple(held) for name, held in holders.items() if len(held) > 1 and index in held},
        )
        for index, part in enumerate(parts)
    ]


def _slice(where: StageCut, stage: int) -> StageModule:
    """Return a stage, with index 0 and without shared parameters; one object for equal stages of all cuts."""
    key = (
        where.grad,
        frozenset(where.forward[stage]),
        frozenset(where.again[stage]),
        tuple((node, node in where.differentiated[stage]) for node in where.across[stage]),
        tuple((node, node in where.differentiated[stage + 1]) for node in where.across[stage + 1])
        if stage < where.last
        else None,
    )
    if key not in where.step.slices:
        where.step.slices[key] = _Slice(where, stage).build()
    part: StageModule = where.step.slices[key]
    return part


class _Slice:
    """The graph of one stage, while it is built."""

    def __init__(self, where: StageCut, stage: int) -> None:
        self.where = where
        self.step = where.step
        self.joint = where.joint
        self.stage = stage
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[JointInput] = []
        self.outputs: list[JointOutput] = []
        # Nodes whose tensors have another layout than in the step.
        self.relaid: set[fx.Node] = set()
        self.received = where.across[stage]
        self.passed = where.across[stage + 1] if stage < where.last else ()
        self.differentiated = where.differentiated[stage]
        self.behind = where.differentiated[stage + 1] if stage < where.last else frozenset[fx.Node]()
        self.tangents: dict[fx.Node, fx.Node] = {}

    def build(self) -> StageModule:
        where, stage = self.where, self.stage
        own = {*where.again[stage], *where.forward[stage]}
        running = [node for node in self.joint.graph.nodes if node in own]
        read = {source for node in (*running, *where.backward[stage]) for source in node.all_input_nodes}
        read.update(self._results, (value for _, value in where.changes[stage]))
        read.update(node for output, _ in where.changes[stage] for node in [self._source(output.name)])
        module, arguments = self._module(read)
        names = result_names(pytree.tree_flatten(tuple(self._results))[1])
        self._add_inputs(read, arguments)
        self._add_tangents(names)
        for node in running:
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        gradients = self._run_backward()
        self._follow_layouts()
        self._add_outputs(names, gradients)
        self.graph.output(tuple(output.node for output in self.outputs))
        received = tuple(_boundary_tensor(node, node in self.differentiated) for node in self.received)
        passed = tuple(_boundary_tensor(node, node in self.behind) for node in self.passed)
        differentiable = self.joint.histories.differentiable if where.grad else frozenset[str]()
        ends = zip(self.joint.result.names, self.step.outputs, strict=True)
        returned = (
            tuple(value.like for value in passed)
            if stage < where.last
            else tuple(_meta_tensor(node.meta["val"], name in differentiable) for name, node in ends)
        )
        part = StageModule(0, module, received, arguments, passed, returned, {}, self.joint)
        return replace(part, step=simplify_step(self._joint_graph(part, names), self.step.mp_policy))

    @property
    def _results(self) -> tuple[fx.Node, ...]:
        return self.where.results(self.stage)

    def _source(self, name: str) -> fx.Node:
        return next(node for node, item in self.step.sources.items() if item.name == name and item.kind != "tangent")

    def _module(self, read: Collection[fx.Node]) -> tuple[nn.Module, dict[str, tuple[str, torch.Tensor]]]:
        """Return the module with the parameters and buffers of the stage, and the inputs of the model that it takes."""
        keywords = {item.name: node.name for node, item in self.step.exported.placeholders.items()}
        trained = {item.name for item in self.step.exported.inputs if item.fake.requires_grad}
        arguments = {
            item.name: (keywords[item.name], _meta_tensor(node.meta["val"], item.name in trained))
            for node, item in self.step.sources.items()
            if item.kind == "input" and node in read
        }
        whole = self.step.module
        names = [*map(tensor_name, self.received), *(keyword for keyword, _ in arguments.values())]
        module = _holder(f"{type(whole).__name__}Stage", names)
        module.training = whole.training
        # In the module's order, so that the first name of a tied parameter there is its first name here, too.
        for node, item in self.step.sources.items():
            if node in read and item.kind in ("parameter", "buffer"):
                for name in self.joint.aliases.get(item.name, (item.name,)):
                    register_tensor(module, name, whole)
        return module, arguments

    def _add_inputs(self, read: Collection[fx.Node], arguments: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        sources = self.step.sources

        def add(kinds: Collection[str]) -> None:
            for node, item in sources.items():
                if item.kind in kinds and node in read:
                    self.copies[node] = self._placeholder(node)
                    self.inputs.append(replace(item, node=self.copies[node]))

        add(("parameter", "buffer"))
        for node in self.received:
            self.copies[node] = copy = self._placeholder(node)
            self._lay_contiguously(copy)
            self.inputs.append(JointInput("input", tensor_name(node), copy))
        # Names of inputs are those of the arguments of the stage.
        for item in [item for node, item in sources.items() if item.kind == "input" and node in read]:
            self.copies[item.node] = self._placeholder(item.node)
            self.inputs.append(replace(item, name=arguments[item.name][0], node=self.copies[item.node]))
        add(("constant",))

    def _placeholder(self, node: fx.Node) -> fx.Node:
        copy = self.graph.create_node("placeholder", node.name, name=node.name)
        copy.meta = self._meta(node, "is_forward")
        return copy

    def _meta(self, node: fx.Node, tag: str) -> dict[str, Any]:
        """Return what a placeholder or a copy says of the tensor of a node: nothing of the operator that made it."""
        meta: dict[str, Any] = {"partitioner_tag": tag}
        return meta | {key: node.meta[key] for key in ("val", "sizes", "module_path") if key in node.meta}

    def _lay_contiguously(self, node: fx.Node) -> None:
        """Have the tensor of a node lie as messages do."""
        value = node.meta["val"]
        if not value.is_contiguous():
            node.meta["val"] = _rerun(value, lambda: torch.empty(value.shape, dtype=value.dtype))
            self.relaid.add(node)

    def _add_tangents(self, names: Sequence[str]) -> None:
        """Add the gradients that come from the stage behind, or those of the outputs."""
        if self.stage == self.where.last:
            own = dict(zip(self.joint.result.names, names, strict=True))
            for item in self.joint.inputs:
                if item.kind == "tangent" and self.where.grad:
                    self.copies[item.node] = copy = self._placeholder(item.node)
                    copy.meta = self._meta(item.node, "is_backward")
                    self.inputs.append(JointInput("tangent", own[item.name], copy))
            return
        for node, name in zip(self.passed, names, strict=True):
            if node in self.behind:
                copy = self.graph.placeholder(f"tangents_{len(self.tangents) + 1}")
                copy.meta = self._meta(node, "is_backward")
                self._lay_contiguously(copy)
                self.relaid.add(copy)  # gradients in the step need not lie as the values do
                self.tangents[node] = copy
                self.inputs.append(JointInput("tangent", name, copy))

    def _run_backward(self) -> dict[fx.Node, fx.Node]:
        """Copy the derivatives, and return the gradients of parameters and received values."""
        gradients: dict[fx.Node, fx.Node] = {}
        values = self.step.marked.values
        taken: set[fx.Node] = set()
        running = {*self.where.backward[self.stage]}
        for node in self.joint.graph.nodes if self.where.grad else ():
            if node in running:
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            elif node in self.step.contributions:
                value = values.get(value_number(node))
                gradient = self._sum(node.all_input_nodes[0], node)
                if value in self.tangents and value not in taken:
                    taken.add(value)
                    gradient = self._add(self.tangents[value], gradient, node)
                if gradient is None:
                    continue
                self.copies[node] = gradient
                if value is not None and self._is_from_outside(value):
                    gradients[value] = self._add(gradients.get(value), gradient, node)
        return gradients

    def _is_from_outside(self, value: fx.Node) -> bool:
        return value in self.step.sources or value in self.received

    def _sum(self, node: fx.Node, mark: fx.Node) -> fx.Node | None:
        """Return what this stage contributes to a gradient, added up in the order of the step; None for nothing."""
        if node not in self.step.sums:
            contributors = dict(self.step.contributions[mark])
            contributor = contributors[node]
            stage = self.where.last if contributor is None else self.where.placed[contributor]
            return self.copies[node] if stage == self.stage else None
        first, second = (self._sum(operand, mark) for operand in addends(node))
        if first is None or second is None:
            return first or second
        copy = self.graph.call_function(aten.add.Tensor, (first, second))
        copy.meta = dict(node.meta)
        return copy

    def _add(self, first: fx.Node | None, second: fx.Node | None, mark: fx.Node) -> fx.Node:
        """Return the sum of two gradients of a value, of which there may be one."""
        if first is None or second is None:
            gradient = first or second
            assert gradient is not None
            return gradient
        copy = self.graph.call_function(aten.add.Tensor, (first, second))
        copy.meta = {**mark.meta, "val": first.meta["val"], "is_gradient_acc": True}
        self.relaid.add(copy)
        return copy

    def _add_outputs(self, names: Sequence[str], gradients: Mapping[fx.Node, fx.Node]) -> None:
        differentiated = {item.name for item in self.inputs if item.kind == "tangent"}
        for node, name in zip(self._results, names, strict=True):
            copy = self.copies[node]
            if self.stage < self.where.last and not copy.meta["val"].is_contiguous():
                tail = self.graph.call_function(aten.clone.default, (copy,), {"memory_format": torch.contiguous_format})
                tail.meta = self._meta(copy, "is_forward")
                self._lay_contiguously(tail)
                copy = tail
            if name not in differentiated:
                # As in a step that was traced: where the module copies such a tensor, the caller gets no copy.
                tail = self.graph.call_function(aten.detach.default, (copy,))
                tail.meta = self._meta(copy, "is_forward")
                copy = tail
            self.outputs.append(JointOutput("output", name, copy, name if name in differentiated else None))
        # Inputs of the model have the names of the stage's arguments.
        names_of = {item.node: item.name for item in self.inputs}
        for output, value in self.where.changes[self.stage]:
            name = names_of[self.copies[self._source(output.name)]]
            self.outputs.append(replace(output, name=name, node=self.copies[value]))
        wanted = {output.name for output in self.joint.outputs if output.kind == "gradient" and self.where.grad}
        for node, item in self.step.sources.items():
            if item.name in wanted and item.kind != "tangent" and node in self.copies:
                self.outputs.append(JointOutput("gradient", names_of[self.copies[node]], gradients.get(node)))
        for node in self.received:
            if node in self.differentiated:
                self.outputs.append(JointOutput("gradient", tensor_name(node), gradients[node]))

    def _follow_layouts(self) -> None:
        """Compute again what tensors look like behind those that have another layout than in the step."""
        for node in list(self.graph.nodes) if self.relaid else ():
            if node.op != "call_function" or self.relaid.isdisjoint(node.all_input_nodes):
                continue
            before = node.meta["val"]
            try:
                value = _rerun(before, lambda node=node: _call(node))
            except (RuntimeError, ValueError):
                # A view of another layout may not exist: the numbers are copied first.
                (source,) = node.all_input_nodes
                with self.graph.inserting_before(node):
                    copy = self.graph.call_function(
                        aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                    )
                copy.meta = self._meta(source, node.meta["partitioner_tag"])
                self._lay_contiguously(copy)
                node.replace_input_with(source, copy)
                value = _rerun(before, lambda node=node: _call(node))
            if _strides(value) != _strides(before):
                node.meta["val"] = value
                self.relaid.add(node)

    def _joint_graph(self, part: StageModule, names: Sequence[str]) -> JointGraph:
        args, kwargs = part.example
        wanted = any(output.kind == "gradient" for output in self.outputs)
        bound = BoundCall.of(part.module, args, kwargs, wanted)
        results = pytree.tree_flatten(tuple(self._results))[1]
        held = {item.name for item in self.inputs if item.kind in ("parameter", "buffer")}
        differentiable = [name for name, like in zip(names, part.returned, strict=True) if like.requires_grad]
        joint = JointGraph(
            graph_module=fx.GraphModule(nn.Module(), self.graph),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            aliases={name: aliases for name, aliases in self.joint.aliases.items() if name in held},
            signature=bound.signature,
            fingerprint="",
            call=call_layout(part.module, bound.structure, bound.leaves),
            result=ResultLayout(results, tuple(names)),
            histories=OutputHistories(frozenset(differentiable)),
        )
        if self.joint.dynamic is None:
            return joint
        dims = {item.name: _dynamic_dims(item.node) for item in self.inputs if item.kind == "input"}
        return replace(joint, dynamic=replace(self.joint.dynamic, dims={name: of for name, of in dims.items() if of}))


def _holder(name: str, arguments: Sequence[str]) -> nn.Module:
    """Return an empty module, whose `forward` has arguments of these names."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError("a stage is run by its program, and none has been made of this one.")

    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", *arguments)]
    vars(forward)["__signature__"] = Signature(parameters)
    module: nn.Module = type(name, (nn.Module,), {"forward": forward})()
    return module


def _dynamic_dims(node: fx.Node) -> dict[int, sympy.Expr]:
    (shape,) = node.meta.get("sizes") or [()]
    return {dim: size.expr for dim, size in enumerate(shape) if isinstance(size, DynamicSize)}


def _boundary_tensor(node: fx.Node, requires_grad: bool) -> BoundaryTensor:
    return BoundaryTensor(tensor_name(node), _meta_tensor(node.meta["val"], requires_grad), *node.meta.get("sizes", ()))


def _meta_tensor(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=requires_grad)


def _rerun(like: Any, make: Any) -> Any:
    """Return what a function makes in the mode of a fake tensor, or of the first of several."""
    first = next(leaf for leaf in pytree.tree_leaves(like) if isinstance(leaf, torch.Tensor))
    assert isinstance(first, FakeTensor)
    with first.fake_mode:
        return make()


def _call(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    args, kwargs = fx.node.map_aggregate((args, kwargs), plain)
    target: Any = node.target
    return target(*args, **kwargs)


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [leaf.stride() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def register_tensor(module: nn.Module, path: str, whole: nn.Module) -> None:
    """Register a parameter or buffer of the whole module in another one, under one of its names there."""
    owner, name = owner_of(module, path)
    holder = whole.get_submodule(path.rpartition(".")[0])
    if name in holder._parameters:
        owner.register_parameter(name, holder._parameters[name])
    else:
        owner.register_buffer(name, holder._buffers[name], is_persistent(holder, name))


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the tensor of a path, created if necessary, and the tensor's name there."""
    *parts, name = path.split(".")
    owner = module
    for part in parts:
        if part not in owner._modules:
            owner.add_module(part, nn.Module().train(module.training))
        owner = owner.get_submodule(part)
    return owner, name
