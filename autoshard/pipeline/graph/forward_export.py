"""`export_forward`: the forward graph of a module, to be cut into stages; its stage graph has seconds and bytes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import OpOverload
from autoshard.capture.capture_errors import node_line
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.flat_modules import Effects
from autoshard.capture.joint import capture_forward
from autoshard.capture.marks import TaskGraph, defaults_of, mark_defaults
from autoshard.capture.nodes import is_random
from autoshard.capture.python.called_code import PythonCall, is_effect
from autoshard.capture.recomputation import group_by_list_element
from autoshard.cluster.cost import CostModel
from autoshard.errors import CaptureError
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.operators.attention.attention_operator import attention
from autoshard.operators.norms import rms_norm
from autoshard.operators.recurrent.time_loops import gru_cell, lstm_cell
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from autoshard.program.dry_run import CallCost, DryRun
from autoshard.program.program_replay import tensors

aten = torch.ops.aten

# Export asserts the device of a tensor that is cast: that fails on another device than that of the export.
_ASSERTIONS = frozenset({aten._assert_tensor_metadata.default})

# Functions of this library in the place of operators, that draw no random numbers.
_DRAWLESS = (attention, gru_cell, lstm_cell, rms_norm)

# Keys of a node's meta: its place in the model, and its task graph.
_PLACE = ("nn_module_stack", "custom")


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModule:
    """A module's forward graph: ATen operators, a placeholder for every parameter, buffer, constant and input tensor.

    Attributes:
        module: the module, whose parameters and buffers the stages will hold.
        forward: the graph, its inputs and outputs, and the layout of calls and results. Every node has `meta["val"]`, a
            fake tensor (or several). No operator takes several results of another as one list, as only tensors cross
            stages.
        together: groups of names of nodes that must run on one stage: all that make, read or change a tensor up to its
            last change in place; all that read or change a buffer that is changed. A group may be of one node.
        differentiable: names of nodes whose value requires a gradient.
        random: names of nodes that may draw random numbers.
    """

    module: nn.Module
    forward: Exported
    together: tuple[tuple[str, ...], ...]
    differentiable: frozenset[str]
    random: frozenset[str]

    @property
    def graph(self) -> fx.Graph:
        """The nodes."""
        return self.forward.graph_module.graph

    @property
    def sources(self) -> dict[fx.Node, ExportedInput]:
        """The input of every placeholder: its kind, its name, and the numbers of a constant."""
        return dict(zip(self.graph.find_nodes(op="placeholder"), self.forward.inputs, strict=True))

    @property
    def operators(self) -> tuple[fx.Node, ...]:
        """The nodes that need a stage, in topological order."""
        return tuple(_operators(self.graph))


def export_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    task_graphs: Mapping[str, TaskGraph] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    dynamic: Dynamic | None = None,
) -> ExportedModule:
    """Export one call of a module for a pipeline. Weights are neither changed nor copied.

    The graph is of the sizes of this call, and of the module's training or evaluation mode. Stages run one microbatch
    at a time: pass the tensors of one microbatch (see `microbatches`).

    Args:
        module: the module; it may be on the meta device.
        args: positional arguments of a call with one microbatch; real, meta or fake tensors, and plain values.
        kwargs: keyword arguments of that call.
        grad: True if gradients will be wanted.
        task_graphs: hints for modules by their paths; they have precedence over the modules' defaults.
        mp_policy: precisions of parameters, inputs and outputs, as casts in the graph. Every operator that reads a
            parameter has a cast of its own, so that its stage needs no other stage's.
        dynamic: dims of inputs that are dynamic sizes, as in `capture`: arguments in the graph that depend on them are
            `DynamicSize`s, and `meta["sizes"]` has such shapes.

    Raises:
        CaptureError: the module cannot be captured as one graph; the message names the line of the user's code.
        InputError: an argument is of a type that cannot be part of a signature.
    """
    forward, effects = capture_forward(module, args, kwargs, grad=grad, dynamic=dynamic, mp_policy=mp_policy)
    _refuse_reads(forward)
    _refuse_kept(forward)
    # Groups are found before results and casts are split: effects know the nodes of the capture alone.
    graph = forward.graph_module.graph
    for node in [node for node in graph.nodes if node.target in _ASSERTIONS]:
        graph.erase_node(node)
    graph.eliminate_dead_code(
        is_impure_node=lambda node: node.op in ("placeholder", "output") or node in effects.changed or is_effect(node)
    )
    together = _inseparable_groups(graph, effects)
    differentiable = {node.name for node in graph.nodes if node in effects.differentiable}
    _split_result_lists(graph, differentiable)
    _split_casts(forward, differentiable)
    mark_defaults(graph, {**defaults_of(module), **(task_graphs or {})})
    graph.lint()
    forward.graph_module.recompile()
    return ExportedModule(
        module=module,
        forward=forward,
        together=together,
        differentiable=frozenset(differentiable),
        random=frozenset(node.name for node in graph.nodes if _may_be_random(node, forward.graph_module)),
    )


def _operators(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _inseparable_groups(graph: fx.Graph, effects: Effects) -> tuple[tuple[str, ...], ...]:
    """Return the groups of nodes that must run on one stage, because of changes in place and of hooks."""
    operators = _operators(graph)
    # By node, the memory of its operands and results.
    touched = {
        node: effects.memory[node].union(*(effects.memory[source] for source in node.all_input_nodes))
        for node in operators
    }
    held = frozenset[int]().union(*(effects.memory[node] for node in graph.find_nodes(op="placeholder")))
    groups: list[set[fx.Node]] = []
    for group in _gradient_groups(graph):
        groups = _merge_group(groups, group)
    for piece in dict.fromkeys(piece for changed in effects.changed.values() for piece in sorted(changed)):
        touching = [node for node in operators if piece in touched[node]]
        # Memory of inputs and buffers outlives the step: all that touches it stays together.
        if piece not in held:
            last = max(place for place, node in enumerate(touching) if piece in effects.changed.get(node, ()))
            touching = touching[: last + 1]
        groups = _merge_group(groups, {*touching})
    position = {node: place for place, node in enumerate(operators)}
    ordered = [sorted(group, key=position.__getitem__) for group in groups]
    return tuple(tuple(node.name for node in group) for group in sorted(ordered, key=lambda group: position[group[0]]))


def _merge_group(groups: list[set[fx.Node]], added: set[fx.Node]) -> list[set[fx.Node]]:
    """Return the groups with another one, joined with those that share nodes with it."""
    joined = added.union(*(group for group in groups if not group.isdisjoint(added)))
    return [group for group in groups if group.isdisjoint(added)] + [joined]


def _gradient_groups(graph: fx.Graph) -> Iterator[set[fx.Node]]:
    """Yield the nodes that run on one stage with a call of Python code that needs the autograd graph of its operands.

    Raises:
        CaptureError: a hook is on a parameter or input, whose gradient comes from several stages; or on a function, as
            those of modules are, which may run on several.
    """
    for node in graph.nodes:
        if isinstance(node.target, PythonCall) and node.target.history:
            operands: Any = node.args[0]
            tensors = operands[: node.target.history]
            _check_hook(node.target, tensors)
            # The call, its operands, and all nodes between operands, or between them and the call.
            behind = closure(tensors, lambda node: node.users)
            ahead = ancestors([node])
            yield {between for between in behind & ahead if between.op == "call_function"}


def _check_hook(call: PythonCall, operands: list[fx.Node]) -> None:
    if call.shares_state:
        raise CaptureError(
            f"the hook at {call.where} is of a module or function, and a pipeline may cut through what it is of. Set "
            "hooks on tensors (tensor.register_hook(hook) in forward), or use a mesh without a pipeline axis."
        )
    if call.has_effect and operands[0].op == "placeholder":
        raise CaptureError(
            f"{call.__name__} at {call.where} is on a parameter or an input of the model, which a pipeline may need on "
            "several stages. Set it on the parameter outside of forward, or use a mesh without a pipeline axis."
        )


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes with all nodes that they depend on."""
    return closure(nodes, lambda node: node.all_input_nodes)


def closure(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """Return nodes with all nodes that can be reached from them."""
    reached = set(nodes)
    waiting = list(reached)
    while waiting:
        new = [node for node in following(waiting.pop()) if node not in reached]
        reached.update(new)
        waiting.extend(new)
    return reached


def _split_result_lists(graph: fx.Graph, differentiable: set[str]) -> None:
    """Take a list of results of an operator apart, where another operator takes it whole."""
    for node in _operators(graph):
        several = isinstance(node.meta.get("val"), (tuple, list))
        takers = [user for user in node.users if several and user.op == "call_function" and not is_part(user)]
        if not takers:
            continue
        parts: list[fx.Node] = []
        for place, value in enumerate(node.meta["val"]):
            with graph.inserting_after(parts[-1] if parts else node):
                part = graph.call_function(operator.getitem, (node, place))
            part.meta = {**node.meta, "val": value}
            parts.append(part)
        if node.name in differentiable:
            differentiable.update(part.name for part in parts if part.meta["val"].is_floating_point())
        for user in takers:
            user.args, user.kwargs = _with_parts((user.args, user.kwargs), node, parts)


def _with_parts(arguments: Any, whole: fx.Node, parts: list[fx.Node]) -> Any:
    return fx.map_arg(arguments, lambda operand: parts if operand is whole else operand)


def _split_casts(forward: Exported, differentiable: set[str]) -> None:
    """Give every operator that reads the cast of a parameter a cast of its own."""
    graph = forward.graph_module.graph
    for node, source in zip(graph.find_nodes(op="placeholder"), forward.inputs, strict=True):
        if source.kind != "parameter":
            continue
        for cast in [user for user in node.users if is_cast(user)]:
            # The first reader keeps the cast that there is.
            for user in [user for user in cast.users if user.op != "output"][1:]:
                with graph.inserting_before(user):
                    copy = graph.node_copy(cast)
                copy.meta = {**cast.meta, **{key: user.meta[key] for key in _PLACE if key in user.meta}}
                if cast.name in differentiable:
                    differentiable.add(copy.name)
                user.replace_input_with(cast, copy)


def is_cast(node: fx.Node) -> bool:
    """Return True if the node is its operand in another dtype."""
    return node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}


def is_part(node: fx.Node) -> bool:
    """Return True if the node takes one of several results of an operator: it runs where the operator does."""
    return node.target is operator.getitem


def _may_be_random(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return True if a node may draw random numbers; of a region, if any of its nodes may."""
    if node.op != "call_function" or is_part(node):
        return False
    for source in node.all_input_nodes:
        region = module.get_submodule(str(source.target)) if source.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            return any(_may_be_random(inner, region) for inner in region.graph.nodes)
    # Other functions in the place of operators may have dropout in them.
    return is_random(node) or not (isinstance(node.target, OpOverload) or node.target in _DRAWLESS)


def _refuse_kept(forward: Exported) -> None:
    """Refuse a `forward` that leaves tensors in attributes, containers or variables."""
    kept = {attribute.name for attribute in forward.result.attributes}
    for name, node in zip(forward.result.names, forward.outputs, strict=True):
        if name in kept:
            changed = (change.line for change in forward.state.mutations if name.startswith(change.path))
            raise CaptureError(
                f"{next(changed, '') or node_line(node)} keeps a tensor ({name}), which no pipeline does: one rank "
                "computes it, one microbatch after another. Return it from forward, or have no pipeline axis."
            )


def _refuse_reads(forward: Exported) -> None:
    """Refuse a `forward` whose program depends on the numbers in tensors: every call would have to read them first."""
    lines = [reading.line for reading in forward.state.conditions.readings]
    lines += [check.line for check in forward.result.checks]
    if lines:
        raise CaptureError(
            f"{lines[0]} asks for the numbers in a tensor, which no pipeline does: its stages run one program each. "
            "Take the question out of forward, write the branch as torch.where, or use a mesh without a pipeline axis."
        )


def read_stage_graph(
    exported: ExportedModule, cost: CostModel, *, optimizer: OptimizerMemory | None = None
) -> StageGraph:
    """Read the stage graph of an exported module.

    Args:
        exported: the module, exported with an example of one microbatch.
        cost: prices of one device.
        optimizer: the state of every trained parameter; AdamW's by default.

    Returns:
        One node for every operator, or for operators that must stay together: those of `exported.together`; an operator
        of several results with the nodes that take them out; an operator without a result with the one that it watches.
        Seconds and saved bytes are those of `program.dry_run`, plus the additions of gradients where several operators
        read one value. A saved tensor counts once, where it was made, however many operators read it or views of it.
    """
    return _Reader(exported, cost, optimizer or optimizer_memory(None, None, foreach=False)).read()


class _Reader:
    """One pass over a graph."""

    def __init__(self, exported: ExportedModule, cost: CostModel, optimizer: OptimizerMemory) -> None:
        self.exported = exported
        self.cost = cost
        self.optimizer = optimizer
        sources = exported.sources
        self.names = {node: source.name for node, source in sources.items() if source.kind in ("parameter", "buffer")}
        self.parameters = {node for node, source in sources.items() if source.kind == "parameter"}
        self.needs = {node: node in self.parameters and source.fake.requires_grad for node, source in sources.items()}
        self.nodes = exported.operators
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.costs: dict[fx.Node, CallCost] = {}
        # The node and the number of its result that own the memory of a node's tensor.
        self.memory: dict[fx.Node, tuple[fx.Node, int]] = {}

    def read(self) -> StageGraph:
        run = DryRun(self.cost)
        for node in self.exported.graph.nodes:
            self.memory[node] = node, 0
            if node in self.position:
                self._price_node(node, run)
        saved = self._saved_bytes()
        recompute_seconds = self._recompute_seconds()
        layers = self._layers()
        nodes, values = [], []
        for place, node in enumerate(self.nodes):
            call, value = self.costs[node], node.meta.get("val")
            size = _bytes(value)
            readers = [user for user in node.users if user in self.position]
            differentiated = sum(self.needs[user] for user in readers) if self.needs[node] else 0
            nodes.append(
                StageNode(
                    name=node.name,
                    forward_seconds=call.forward_seconds,
                    backward_seconds=call.backward_seconds + self._additions(value, differentiated - 1),
                    saved_bytes=saved.get(node, 0) + call.saved_inside,
                    at_rest=tuple(
                        dict.fromkeys(self.names[source] for source in node.all_input_nodes if source in self.names)
                    ),
                    members=(node.name,),
                    layer=layers.get(node, ""),
                )
            )
            output = node in self.exported.forward.outputs
            if readers or output:
                users = tuple(sorted(self.position[user] for user in readers))
                gradient_bytes = size if self.needs[node] else 0
                values.append(
                    StageValue(node.name, place, users, size, gradient_bytes, recompute_seconds.get(node), output)
                )
        graph = StageGraph(tuple(nodes), tuple(values), self._at_rest())
        return graph.merge_pairs(tuple(self._inseparable_pairs()))

    def _layers(self) -> dict[fx.Node, str]:
        """Return the path of the layer of every node that belongs to one."""
        stacks = {node: node.meta.get("nn_module_stack") or {"": ("",)} for node in self.nodes}
        groups = group_by_list_element({node: next(reversed(stack.values()))[0] for node, stack in stacks.items()})
        return {node: name for name, nodes in groups.items() for node in nodes}

    def _recompute_seconds(self) -> dict[fx.Node, float]:
        """Return the seconds of computing a value anew on another stage, where inputs, buffers and constants suffice.

        They include all calls that the value depends on, each once.
        """
        differentiated = {node for node, needs in self.needs.items() if needs}
        # Another stage could not see a change in place, and a gradient would have to come back from there.
        changed = {name for group in self.exported.together for name in group}
        fixed = self.parameters | differentiated | {node for node in self.nodes if node.name in changed}
        cones: dict[fx.Node, frozenset[fx.Node]] = {}
        for call in self.nodes:
            possible = call not in fixed and call.name not in self.exported.random
            read = call.all_input_nodes
            if possible and all(source in cones if source in self.position else source not in fixed for source in read):
                cones[call] = frozenset({call}).union(*(cones[source] for source in read if source in cones))
        return {call: sum(self.costs[node].forward_seconds for node in cone) for call, cone in cones.items()}

    def _inseparable_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of positions that one stage must have, the earlier first."""
        last = len(self.nodes) - 1
        for node, place in self.position.items():
            if not isinstance(node.meta.get("val"), torch.Tensor):
                # A result that is no tensor can't be sent: its readers stay with it.
                yield from ((place, self.position[user]) for user in node.users if user in self.position)
            if not node.users:
                # A call that nothing reads, such as a check, stays with the call that it reads. If it reads none, as a
                # count of batches does, it stays with the next call.
                watched = [self.position[source] for source in node.all_input_nodes if source in self.position]
                if node.meta.get("val") is None and watched:
                    yield max(watched), place
                if not watched and last:
                    yield min(place, last - 1), min(place, last - 1) + 1
        places = {node.name: place for node, place in self.position.items()}
        for group in self.exported.together:
            yield from pairwise(sorted(places[name] for name in group))

    def _price_node(self, node: fx.Node, run: DryRun) -> None:
        operands = node.all_input_nodes
        self.costs[node] = call = run.call_cost(node, [self.needs.get(source, False) for source in operands])
        # A part of a result is the operator's: its memory and its gradient are those of that result.
        if node.target is operator.getitem and isinstance(node.args[1], int):
            source, index = operands[0], _result(operands[0], node.args[1])
            cost = self.costs.get(source, CallCost())
            self.needs[node] = cost.needs_gradient[index] if index < len(cost.needs_gradient) else self.needs[source]
            alias = cost.aliases[index] if index < len(cost.aliases) else None
            self.memory[node] = (source, index) if alias is None else self.memory[source.all_input_nodes[alias]]
            return
        self.needs[node] = any(call.needs_gradient)
        if call.aliases and call.aliases[0] is not None:
            self.memory[node] = self.memory[operands[call.aliases[0]]]

    def _saved_bytes(self) -> dict[fx.Node, int]:
        """Return the bytes that backward reads of the results of every node."""
        # A set, as a tensor counts once, however many operators save it or a view of it.
        read = set()
        for node, call in self.costs.items():
            read |= {self.memory[node.all_input_nodes[place]] for place in call.saved_operands}
            read |= {(node, place) for place in call.saved_results}
        saved: dict[fx.Node, int] = {}
        for node, place in read:
            # Inputs and parameters are held anyhow.
            if node in self.costs and place < len(self.costs[node].result_bytes):
                saved[node] = saved.get(node, 0) + self.costs[node].result_bytes[place]
        return saved

    def _additions(self, value: object, count: int) -> float:
        """Return the seconds of adding up the gradients of several readers."""
        if count <= 0 or not isinstance(value, torch.Tensor):
            return 0.0
        # Each addition reads two tensors and writes one.
        return count * self.cost.compute(0.0, 3 * _bytes(value), value.dtype)

    def _at_rest(self) -> dict[str, int]:
        """Return the bytes of every buffer, and of every parameter with its gradient and optimizer state."""
        held = {}
        for node, name in self.names.items():
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                held[name] = _bytes(value)
                if self.needs[node]:
                    shape = tuple(value.shape)
                    held[name] += _bytes(value) + self.optimizer.state_bytes(shape, shape, value.element_size())
        return held


def _result(source: fx.Node, index: int) -> int:
    """Return the number of a result among those that are tensors."""
    value = source.meta.get("val")
    return len(list(tensors(list(value[:index])))) if isinstance(value, (list, tuple)) else index


def _bytes(value: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))
