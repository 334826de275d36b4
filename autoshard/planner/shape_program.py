"""The program of a rank without its numbers: every call that it makes, in order, on tensors that have shapes alone.

What a step holds depends on it to the last copy: temporaries of local programs, buckets of gradients, gathers that are
started ahead. It is made for any decisions in a small part of the time that it takes to make the program itself, since
what equal operators run is recorded once (`recorded`).
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.capture import outside_modes
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Value, uncast
from autoshard.patterns.strategy import resolve_variant
from autoshard.planner.recordings import LocalPrograms
from autoshard.program.kernels import COLLECTIVE_KINDS
from autoshard.reshard.bucket import bucket_reductions
from autoshard.reshard.collective_schedule import schedule
from autoshard.reshard.deferred_reductions import DeferredReduction, PendingReductions, take_reductions
from autoshard.reshard.gathers import propagate_layers
from autoshard.reshard.path import Resharder, Step
from autoshard.specs.emitter import collectives
from autoshard.specs.layout import local_shape

_WAIT = collectives.wait_tensor.default
_MAY_COPY = (torch.ops.aten.reshape.default,)


@dataclass(eq=False)
class Half:
    """The forward or the backward half.

    Attributes:
        graph: its calls. Nodes have in `meta`: `"val"`, the tensor without numbers; `"position"`, the number of the
            operator that they belong to; `"key"`, the name of the value or copy that they are, or are made for;
            `"kind"`, what a tensor made there is for if nothing else is known of it.
        saved: in the backward half, placeholder -> the node of the forward half that it is.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ShapeProgram:
    """Both halves, and what they hand back.

    Attributes:
        forward, backward: the halves.
        inputs: nodes of the tensors that the step is given, by the names of the joint graph's placeholders.
        outputs: (kind, name) of an output -> its node, in the half that makes it.
        unreduced: what is left to do of gradients that are added up first; None where there are none.
    """

    forward: Half
    backward: Half
    inputs: dict[str, fx.Node]
    outputs: dict[tuple[str, str], fx.Node]
    unreduced: PendingReductions | None = None


def build_shape_program(
    flow: Flow, resharder: Resharder, programs: LocalPrograms, reduced: DeferredReduction | None = None
) -> ShapeProgram:
    """The program of some decisions, split in halves and scheduled as the program itself is.

    Args:
        flow: the graph and the decisions.
        resharder: finds the reshards.
        programs: what operators and reshards run.
        reduced: if gradients of parameters are added up over several runs before they are reduced, which ones.
    """
    with outside_modes():
        return _ProgramBuilder(flow, resharder, programs, reduced).run()


def storage_root(node: fx.Node) -> fx.Node:
    """The node in whose memory a node's tensor lies: what it is a view of, or itself."""
    while True:
        source = _view_source(node)
        if source is None:
            return node
        node = source


def _view_source(node: fx.Node) -> fx.Node | None:
    """The node that a node's tensor is a view of; None where it has memory of its own."""
    if node.op != "call_function":
        return None
    if node.target is _WAIT:
        return next(iter(node.all_input_nodes), None)
    if node.target is operator.getitem:
        made = node.all_input_nodes[0]
        return made.all_input_nodes[0] if makes_views(made) else None
    if not makes_views(node):
        return None
    source = node.all_input_nodes[0]
    if node.target not in _MAY_COPY:
        return source if isinstance(node.meta["val"], torch.Tensor) else None
    val: torch.Tensor = source.meta["val"]
    return source if _is_view(tuple(val.shape), val.stride(), tuple(node.meta["val"].shape)) else None


@functools.lru_cache(maxsize=1 << 12)
def _is_view(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor that lies so in memory can be looked at in another shape."""
    try:
        torch.empty_strided(shape, strides, device="meta").view(target)
    except RuntimeError:
        return False
    return True


@functools.cache
def _name_of(op: Any) -> str:
    """What the calls of an operator are named after."""
    return str(getattr(op, "overloadpacket", op).__name__)


@functools.cache
def _returns_views(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def makes_views(node: fx.Node) -> bool:
    """Whether what a call makes lies in the memory of its first operand; a reshape may copy all the same."""
    return _returns_views(node.target)


class _ProgramBuilder:
    """One walk over the joint graph, as the program is made, with one graph for each half."""

    def __init__(
        self, flow: Flow, resharder: Resharder, programs: LocalPrograms, reduced: DeferredReduction | None
    ) -> None:
        self.flow = flow
        self.reduced: DeferredReduction | None = reduced
        self.rules = flow.rules
        self.resharder = resharder
        self.programs = programs
        self.halves = {"forward": Half(), "backward": Half()}
        self.node_of_key: dict[str, fx.Node] = {}  # key of a value or copy -> its node, in the half that makes it
        self.zeros: set[fx.Node] = set()
        self.masked_operands: dict[tuple[fx.Node, str], fx.Node] = {}
        self.gradient_roots: set[fx.Node] = set()
        self.outputs: dict[tuple[str, str], fx.Node] = {}
        self.phase = "forward"
        self.position = 0
        self.key = ""
        self.kind = "temporary"
        self.shared: list[fx.Node] = []
        self.half_of: dict[fx.Node, str] = {}
        self.saved_placeholders: dict[tuple[fx.Node, str], fx.Node] = {}
        self.local_calls: list[tuple[tuple[Any, ...], list[fx.Node]]] = []  # what a local program stands for, its calls

    def run(self) -> ShapeProgram:
        inputs = self._inputs()
        for source in self.flow.graph.inputs:
            self._add_outputs(Value(source.node))
        for position, node in enumerate(self.rules.operators):
            self.position = position
            self._operator(node)
            for index in range(len(self.rules.calls[node].results)):
                self._add_outputs(Value(node, index))
        unreduced = self._finish()
        return ShapeProgram(self.halves["forward"], self.halves["backward"], inputs, self.outputs, unreduced)

    # Nodes

    def _inputs(self) -> dict[str, fx.Node]:
        inputs = {}
        for source in self.flow.graph.inputs:
            value = Value(source.node)
            half = "backward" if source.kind == "tangent" else "forward"
            shape = local_shape(value.meta.shape, self.flow.produced_spec(value), self.flow.mesh)
            node = self._placeholder(half, source.node.name, shape, value.meta.dtype)
            if source.kind == "parameter":
                node.meta["layer"] = self.rules.parameter_layers[source.name]
            self.node_of_key[value.name] = inputs[source.node.name] = node
            self.zeros.add(node)
        numbers = (*self.flow.mesh.names, "seed")
        self.shared = [self._placeholder("forward", f"rank_{name}", (), torch.int64) for name in numbers]
        return inputs

    def _placeholder(self, half: str, name: str, shape: Any, dtype: torch.dtype) -> fx.Node:
        node = self.halves[half].graph.placeholder(name)
        self._set_meta(node, half, self.programs.empty(shape, dtype))
        return node

    def _set_meta(self, node: fx.Node, half: str, val: Any) -> None:
        node.meta.update(val=val, position=self.position, key=self.key or node.name, kind=self.kind)
        node.meta["partitioner_tag"] = f"is_{half}"
        self.half_of[node] = half

    def _in_current_half(self, node: fx.Node) -> fx.Node:
        """The node as this half sees it: what the forward half made is saved for the backward half."""
        if self.half_of[node] == self.phase or self.phase == "forward":
            return node
        key = (node, self.phase)
        if key not in self.saved_placeholders:
            graph = self.halves["backward"].graph
            first = next(iter(graph.nodes), None)
            with graph.inserting_before(first) if first is not None else graph.inserting_after():
                # Under a name of its own kind: looking for a free one begins behind the one of its kind given last.
                self.saved_placeholders[key] = graph.placeholder(f"saved_{node.name}")
            self._set_meta(self.saved_placeholders[key], "backward", node.meta["val"])
            self.halves["backward"].saved[self.saved_placeholders[key]] = node
        return self.saved_placeholders[key]

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        # Given behind, since a new node's arguments are looked through for symbols, which takes longer than all else.
        node = self.halves[self.phase].graph.create_node("call_function", op, name=_name_of(op))
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        self._set_meta(node, self.phase, val)
        return node

    # The walk

    def _operator(self, node: fx.Node) -> None:
        phase = self.flow.graph.phase(node)
        operands = [
            self._read(value, phase, self.flow.consumed_spec(node, operand))
            for operand, value in enumerate(self.rules.operands[node])
        ]
        self.phase, self.key, self.kind = phase, node.name, "temporary"
        if self.rules.pin_spec(node, self.flow.mesh) is not None:
            self.node_of_key[Value(node).name] = operands[0]
            return
        operands = [self.masked_operands.get((operand, phase), operand) for operand in operands]
        call, rule, choices = self.rules.calls[node], self.rules.rules[node], self.flow.decisions.choices[node.name]
        zeros = tuple(operand in self.zeros for operand in operands)
        recorded = self.programs.operator(
            call, rule, choices, operands=[operand.meta["val"] for operand in operands], zeros=zeros
        )
        given = [*map(self._in_current_half, operands), *map(self._in_current_half, self.shared)]
        is_local = resolve_variant(rule, choices)[0].local is not None
        local_calls: list[fx.Node] = []

        def add_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
            made = self._call(op, args, kwargs, val)
            if is_local and op is not _WAIT and op not in COLLECTIVE_KINDS:
                made.meta["stands_for"] = ()
                local_calls.append(made)
            return made

        node_of = recorded.recording.play(given, add_call)
        if is_local:
            self.local_calls.append(((call, rule, choices, self.rules.zeros[node]), local_calls))
        for place, (operand, filled) in enumerate(zip(operands, recorded.operands, strict=True)):
            if recorded.operand_zeros[place] and filled.index != place:
                self.masked_operands[operand, phase] = node_of(filled)
                self.zeros.add(node_of(filled))
        for index, result in enumerate(recorded.results):
            if result is not None:
                made = self.node_of_key[Value(node, index).name] = self._original(node_of(result), operands, given)
                if recorded.zeros[index]:
                    self.zeros.add(made)

    def _original(self, node: fx.Node, operands: list[fx.Node], given: list[fx.Node]) -> fx.Node:
        """The node of the half that makes it, where a program hands back an operand."""
        return next((own for own, here in zip(operands, given, strict=False) if here is node), node)

    def _read(self, value: Value, phase: str, target: Any, gradient: bool = False) -> fx.Node:
        """The value as `target`; every copy on the way is made once."""
        node = self.node_of_key[value.name]
        for key, source, spec in self.flow.reshards(value, phase, target):
            if key not in self.node_of_key:
                resharder = self.resharder.gradients if gradient and spec is target else self.resharder
                path = resharder.path(value.meta.shape, value.meta.dtype.itemsize, source, spec)
                self.node_of_key[key] = self._reshard(node, path, phase, key, value)
                if node in self.zeros and all(_keeps_zeros(step) for step in path.steps):
                    self.zeros.add(self.node_of_key[key])
            node = self.node_of_key[key]
        return node

    def _reshard(self, node: fx.Node, path: Any, phase: str, key: str, value: Value) -> fx.Node:
        if not path.steps:
            return node
        self.phase, self.key = phase, key
        self.kind = "gathered" if uncast(value.node).op == "placeholder" else "communication"
        recording = self.programs.reshard(path, node.meta["val"])
        given = [self._in_current_half(node), *map(self._in_current_half, self.shared)]
        made = recording.play(given, self._call)(recording.results)
        return self._original(made, [node], given)

    def _add_outputs(self, value: Value) -> None:
        for output in self.rules.outputs_of.get(value, ()):
            gradient = output.kind == "gradient"
            result = self._read(value, phase_of(output), self.flow.output_spec(output), gradient)
            self.outputs[output.kind, output.name] = self._copy_unless_owned(result, value) if gradient else result

    def _copy_unless_owned(self, gradient: fx.Node, value: Value) -> fx.Node:
        """The gradient in contiguous memory of its own."""
        self.phase, self.key, self.kind = "backward", value.name, "temporary"
        here = self._in_current_half(gradient)
        root = storage_root(here)
        fresh = root.op != "placeholder" and root not in self.gradient_roots
        self.gradient_roots.add(root)
        if fresh and (gradient.target is _WAIT or gradient.meta["val"].is_contiguous()):
            return gradient
        val = self.programs.empty(gradient.meta["val"].shape, value.meta.dtype)
        return self._call(torch.ops.aten.clone.default, (here,), {}, val)

    # The halves

    def _finish(self) -> PendingReductions | None:
        """Leave out of both halves what nothing uses, and schedule their collectives; what is reduced later."""
        forward, backward = self.halves["forward"], self.halves["backward"]
        gradients = {name: node for name, node in self.outputs.items() if name[0] == "gradient"}
        self.phase = "backward"
        names = [name for name, node in gradients.items()]
        backward.graph.output(tuple(self._in_current_half(gradients[name]) for name in names))
        _drop_unused(backward.graph)
        for placeholder in [one for one in backward.saved if not one.users]:
            backward.graph.erase_node(placeholder)
            del backward.saved[placeholder]
        others = [node for name, node in self.outputs.items() if name[0] != "gradient"]
        forward.graph.output((*others, *dict.fromkeys(backward.saved.values())))
        _drop_unused(forward.graph)
        propagate_layers(forward.graph)
        for placeholder, saved in backward.saved.items():
            if "layer" in saved.meta:
                placeholder.meta["layer"] = saved.meta["layer"]
        left = {*forward.graph.nodes, *backward.graph.nodes}
        for stands_for, calls in self.local_calls:
            first = next((call for call in calls if call in left), None)
            if first is not None:  # it costs what all cost
                first.meta["stands_for"] = stands_for
        parameters = {source.name for source in self.flow.graph.inputs if source.kind == "parameter"}
        own = [place for place, (_, name) in enumerate(names) if name in parameters]
        unreduced = None if self.reduced is None else take_reductions(backward.graph, own, self.reduced)
        bucket_reductions(backward.graph)
        for half in (forward, backward):
            schedule(half.graph)
        output = next(iter(backward.graph.find_nodes(op="output")))
        self.outputs.update(zip(names, output.args[0], strict=True))
        return unreduced


def _drop_unused(graph: fx.Graph) -> None:
    """Leave out every call that nothing uses; `eliminate_dead_code` would look through the whole graph first."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _keeps_zeros(step: Step) -> bool:
    return step.kind != "make_partial" or "P(product)" not in str(step.target)
