"""`JointGraph`: the captured training step, with properties of its nodes; and the fingerprint of a graph."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Literal

import torch
from torch import fx
from torch.distributed.tensor import Placement

from autoshard.capture._torch import pytree
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.call_layout import CallLayout, ResultLayout
from autoshard.capture.dynamic import DynamicSizes
from autoshard.capture.export import ExportedInput
from autoshard.capture.marks import TaskGraph, parse_pin
from autoshard.capture.output_history import OutputHistories
from autoshard.capture.python.state import PythonState
from autoshard.size import DynamicSize, Ratio

InputKind = Literal["parameter", "buffer", "input", "tangent", "constant"]
OutputKind = Literal["output", "mutation", "gradient"]
Phase = Literal["forward", "backward"]

_PIN = torch.ops.autoshard.pin.default

# Batch norm, forward and backward, with running statistics as arguments 3 and 4 -> the index of the flag that selects
# the statistics of the batch.
_TRAINING_FLAGS = {
    torch.ops.aten._native_batch_norm_legit_functional.default: 5,
    torch.ops.aten.native_batch_norm_backward.default: 7,
}


@dataclass(frozen=True, slots=True)
class JointInput:
    """A placeholder of the joint graph.

    Attributes:
        kind: the kind of input.
        name: the qualified name of a parameter or buffer (the first, if it has several); the path of an input such as
            `input_ids`; for a tangent, the name of the output whose gradient it is.
        node: the placeholder.
        value: the tensor of a constant that the module makes or holds; None if the module was on the meta device.
    """

    kind: InputKind
    name: str
    node: fx.Node
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class JointOutput:
    """An output of the joint graph.

    Attributes:
        kind: the kind of output.
        name: the output's path such as `loss`; for a mutation, the buffer or input that gets the new value; for a
            gradient, its parameter or input.
        node: the node of the value; None for the gradient of an input on which no output depends.
        tangent: the name of the output's tangent, if it has one.
    """

    kind: OutputKind
    name: str
    node: fx.Node | None
    tangent: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JointGraph:
    """The training step of a module (or its forward pass) as one functional graph of ATen operators.

    Attributes:
        graph_module: the graph; every node has `meta["val"]`, a fake tensor (or several) of global shape.
        inputs: the placeholders, in order.
        outputs: the outputs, in order.
        aliases: parameter or buffer -> all names under which it is registered.
        signature: key of the captured call: the signature of all calls that the graph may serve.
        fingerprint: hash of the graph as hexadecimal text, equal on all ranks and in all runs.
        dynamic: the dynamic sizes, if any: `meta["val"]` then has the example's shapes, and `meta["sizes"]` of a node
            the shapes of its results with `DynamicSize`s.
        call: makes the tensors of a call, in the order of the inputs of kind "input".
        result: makes the value of `forward`, from tensors in the order of the outputs of kind "output".
        recomputed: names of the layers, and operators, that the backward half recomputes (see `capture.recomputation`).
        run_once: the same step in which every operator runs once; None if it is this one.
        kept: names of the nodes whose values are neither recomputed nor moved, and the user's mark that keeps them.
        offloaded: names of the values that are moved to the host between the halves (see `capture.offloading`).
        unmoved: the same step without these moves; None if there are none.
        state: the flags, numbers, submodules and hooks that the graph depends on, the changes of these by a call, and
            the conditions on the numbers in inputs.
        histories: the autograd state of the outputs on one device.
        model: the name of the module's class.
        twice_in_pieces: the operations, by dtype, that its losses repeat if computed in pieces (see
            `operators.large_losses`); empty without losses of large logits that nothing else reads.
        unread: names of the outputs that training does not read, and that the graph omits; None if it omits none
            because it has no loss, or was not asked to.
    """

    graph_module: fx.GraphModule
    inputs: tuple[JointInput, ...]
    outputs: tuple[JointOutput, ...]
    aliases: dict[str, tuple[str, ...]]
    signature: Hashable
    fingerprint: str
    call: CallLayout
    result: ResultLayout
    dynamic: DynamicSizes | None = None
    recomputed: tuple[str, ...] = ()
    run_once: JointGraph | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    offloaded: tuple[str, ...] = ()
    unmoved: JointGraph | None = None
    state: PythonState = field(default_factory=PythonState)
    histories: OutputHistories = field(default_factory=OutputHistories)
    model: str = ""
    twice_in_pieces: Mapping[torch.dtype, float] = field(default_factory=dict)
    unread: tuple[str, ...] | None = None

    @property
    def graph(self) -> fx.Graph:
        """The `fx.Graph` of `graph_module`."""
        return self.graph_module.graph

    @property
    def parameters(self) -> tuple[JointInput, ...]:
        """The placeholders of parameters."""
        return tuple(item for item in self.inputs if item.kind == "parameter")

    @property
    def tensor_outputs(self) -> dict[str, fx.Node]:
        """The nodes of the module's outputs, by name; without outputs of None."""
        return {item.name: item.node for item in self.outputs if item.kind == "output" and item.node is not None}

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """The nodes of the gradients, by the name of the parameter or input; without gradients of None."""
        return {item.name: item.node for item in self.outputs if item.kind == "gradient" and item.node is not None}

    @property
    def tangent_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that have a tangent, in the order of the tangents."""
        return tuple(item.name for item in self.inputs if item.kind == "tangent")

    @property
    def outputs_beside_loss(self) -> tuple[str, ...]:
        """Names of the outputs returned beside a loss, a differentiated scalar; empty without a loss."""
        outputs, losses = self.tensor_outputs, set(self.tangent_outputs)
        if not losses or any(outputs[name].meta["val"].ndim for name in losses if name in outputs):
            return ()
        return tuple(name for name in outputs if name not in losses)

    @property
    def gradient_sources(self) -> dict[str, frozenset[str]]:
        """Names of the outputs on whose tangents a gradient depends, by the name of its parameter or input."""
        sources = self._sources([item for item in self.inputs if item.kind == "tangent"])
        return {name: sources.get(node, frozenset()) for name, node in self.gradients.items()}

    @property
    def former_values(self) -> frozenset[str]:
        """Names of the tensors that the step changes, and on whose former values outputs or gradients depend."""
        changed = {item.name for item in self.outputs if item.kind == "mutation"}
        sources = self._sources([item for item in self.inputs if item.name in changed and item.kind != "tangent"])
        results = (item.node for item in self.outputs if item.kind != "mutation" and item.node is not None)
        return frozenset().union(*(sources.get(node, frozenset()) for node in results))

    def _sources(self, inputs: Sequence[JointInput]) -> dict[fx.Node, frozenset[str]]:
        """Return the names of the given inputs that each node depends on; nodes without any are omitted."""
        sources = {item.node: frozenset([item.name]) for item in inputs}
        if not sources:
            return {}
        # In topological order, so that the sources of all operands are known.
        for node in self.graph.nodes:
            if node.op == "call_function":
                operands = [sources[operand] for operand in _read_operands(node) if operand in sources]
                if operands:
                    sources[node] = operands[0].union(*operands[1:])
        return sources

    def phase(self, node: fx.Node) -> Phase:
        """Return the half of the step that the node belongs to."""
        return "backward" if "backward" in node.meta.get("partitioner_tag", "") else "forward"

    def module_path(self, node: fx.Node) -> str:
        """Return the path of the module that called the node, or the forward node that it differentiates."""
        return node.meta.get("module_path", "")

    def task_graph(self, node: fx.Node) -> TaskGraph | None:
        """Return the task graph, of `autoshard.replicate` or `autoshard.split`, that the node belongs to, if any."""
        return node.meta.get("task_graph")

    def pin(self, node: fx.Node) -> tuple[Placement, ...] | None:
        """Return the placements that the user pinned, if the node is a call of `autoshard.shard`."""
        if node.op == "call_function" and node.target is _PIN:
            return parse_pin(str(node.args[1]))
        return None

    def serves(self, call: BoundCall) -> bool:
        """Return True if a call of this signature would be captured as the same graph, by state and inputs."""
        return self.state.guards.hold() and self.state.conditions.hold(self._condition_inputs(call))

    def changes(self, call: BoundCall) -> Iterator[tuple[str, str]]:
        """Yield what has changed for a call of this signature: subjects, and their present values in words."""
        yield from self.state.guards.changes()
        yield from self.state.conditions.changes(self._condition_inputs(call))

    def _condition_inputs(self, call: BoundCall) -> dict[str, torch.Tensor]:
        """Return the tensors of a call by name; empty if the graph does not depend on their numbers."""
        # Most graphs have no conditions, and this runs at every call.
        if not self.state.conditions.inputs:
            return {}
        names = [leaf for leaf in self.call.leaves if isinstance(leaf, str)]
        return dict(zip(names, call.tensors_of(self.call), strict=True))


def _read_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node's results depend on: in training, batch norm reads no running statistics."""
    call = node.args[0] if node.target is operator.getitem else node
    if (
        not isinstance(call, fx.Node)
        or call.target not in _TRAINING_FLAGS
        or not call.args[_TRAINING_FLAGS[call.target]]
    ):
        return node.all_input_nodes
    statistics = [operand for operand in call.args[3:5] if isinstance(operand, fx.Node)]
    if call is node:
        return [operand for operand in node.all_input_nodes if operand not in statistics]
    return [call, *statistics] if node.args[1] in (3, 4) else [call]


def fingerprint(inputs: Iterable[JointInput | ExportedInput], outputs: Iterable[JointOutput], graph: fx.Graph) -> str:
    """Return the SHA-256 of inputs, operators with their arguments, shapes and dtypes, and outputs.

    Plan files store it, so the hashed text of a graph must not change between versions.
    """
    # Nodes are numbered, because their names depend on the process.
    number = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for item in inputs:
        digest.update(f"{item.kind} {item.name}\n".encode())
    for node in graph.nodes:
        if node.op == "get_attr":
            # Regions are hashed by content, because their names depend on the process, too.
            region = getattr(graph.owning_module, str(node.target))
            if isinstance(region, fx.GraphModule):
                digest.update(fingerprint((), (), region.graph).encode())
        arguments = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
        digest.update(f"{node.op} {_target_text(node)} {arguments}".encode())
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor):
                digest.update(f" {tuple(value.shape)} {value.dtype}".encode())
        # The text of a dynamic size is the example's: the expression distinguishes graphs of other sizes.
        for size in pytree.tree_leaves((node.args, node.kwargs, node.meta.get("sizes"))):
            if isinstance(size, (DynamicSize, Ratio)):
                digest.update(f" {size.expr}".encode())
        digest.update(b"\n")
    for output in outputs:
        digest.update(f"{output.kind} {output.name} {output.tangent}\n".encode())
    return digest.hexdigest()


# Modules of functions in graphs -> their names when plan files first stored hashes of such graphs.
_HASHED_MODULES = {
    "autoshard.operators.attention.attention_operator": "autoshard.capture.attention_operator",
    "autoshard.operators.composites": "autoshard.capture.composites",
    "autoshard.operators.bags": "autoshard.capture.operators",
    "autoshard.operators.ctc": "autoshard.capture.operators",
    "autoshard.operators.norms": "autoshard.capture.operators",
    "autoshard.operators.large_losses.loss_operator": "autoshard.capture.loss_operator",
    "autoshard.operators.recurrent.recurrence": "autoshard.capture.recurrent_layers",
    "autoshard.operators.recurrent.time_loops": "autoshard.capture.time_loops",
}


def _target_text(node: fx.Node) -> str:
    """Return the text of the operator or function that a node calls."""
    if node.op != "call_function":
        return ""
    # The repr of a function would contain its memory address.
    if isinstance(node.target, FunctionType):
        module = node.target.__module__
        return f"{_HASHED_MODULES.get(module, module)}.{node.target.__qualname__}"
    return str(node.target)
