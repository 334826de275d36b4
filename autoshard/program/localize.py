"""Rewriting of the joint graph of whole tensors as the program that every rank runs on its shards."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.capture.capture_errors import node_place
from autoshard.capture.fake_module import DEVICE
from autoshard.capture.joint import JointInput
from autoshard.capture.recomputation import RECOMPUTES
from autoshard.errors import PlanError, RuleError
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Value, operand_nodes, value_of
from autoshard.patterns.local import LocalCall, emit_program
from autoshard.patterns.local_values import unwrap
from autoshard.patterns.padding import fill_operands, padded_factors, zero_padded_results
from autoshard.patterns.rule import TensorMeta
from autoshard.patterns.strategy import keeps_shares
from autoshard.program._torch import lazy_graph_module
from autoshard.program.emitter import GraphEmitter
from autoshard.program.kernels import makes_view
from autoshard.program.shares_emitter import SharesEmitter
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Resharder, Step
from autoshard.size import Sizes, at
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.layout import is_even, local_shape
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import Spec

_WAIT = collectives.wait_tensor.default


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor that enters or leaves the program.

    Attributes:
        kind: of the joint graph's input or output: `"parameter"`, `"input"`, `"gradient"`, ...
        name: parameter, buffer, input or output path.
        shape: global shape.
        dtype: element type.
        spec: its placements.
        share: the local shape, where a rank holds an unequal share of a dynamic size.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec
    share: tuple[int, ...] | None = None

    def local_shape(self, mesh: MeshShape) -> tuple[int, ...]:
        """Return the shape of the tensor in the program, padded where a dim does not divide."""
        return local_shape(self.shape, self.spec, mesh) if self.share is None else self.share

    def is_padded(self, mesh: MeshShape) -> bool:
        """Return True if the tensor in the program may be larger than the local tensor outside."""
        return self.share is None and not is_even(self.shape, self.spec, mesh)


@dataclass(frozen=True, slots=True, eq=False)
class LocalStep:
    """The step of one rank, forward and backward in one graph.

    Dynamic sizes stand in shapes and in the graph's arguments as `DynamicSize`s.

    Attributes:
        graph_module: takes the `inputs` that are no tangents, then the rank's coordinates on the program's device and
            on the host, the step's seed, and the tangents; returns the `outputs`.
        inputs: tangents last.
        outputs: forward ones first.
        repeats: True if the backward half gathers tensors again, or runs operators again.
        shared: the axis whose ranks hold unequal shares of a dynamic size, if any.
        gradient_sources: for every gradient by name, the outputs from whose tangents it is computed.
    """

    graph_module: fx.GraphModule
    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    repeats: bool = False
    shared: SharedAxis | None = None
    gradient_sources: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def forward_outputs(self) -> tuple[ProgramTensor, ...]:
        return tuple(border for border in self.outputs if border.kind != "gradient")

    @property
    def gradients(self) -> tuple[ProgramTensor, ...]:
        return tuple(border for border in self.outputs if border.kind == "gradient")

    @property
    def tangents(self) -> tuple[ProgramTensor, ...]:
        return tuple(border for border in self.inputs if border.kind == "tangent")


class Localizer:
    """Rewrites a joint graph by the decisions of a plan.

    Args:
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards; the one that priced them.
        groups: for every mesh axis, the name of the process group of this rank's line along it.
        home: the device of the program's tensors: of this rank, or of its type.
        sizes: where sizes are dynamic, those that stand for all; by default those of the rules.
        shared: the axis whose ranks hold unequal shares, if any.
    """

    def __init__(
        self,
        flow: Flow,
        resharder: Resharder,
        groups: Sequence[str],
        home: torch.device = DEVICE,
        sizes: Sizes | None = None,
        shared: SharedAxis | None = None,
    ) -> None:
        self.sizes = flow.rules.generic if sizes is None else sizes
        self.flow = flow = flow.at(self.sizes)
        self.rules = flow.rules
        self.resharder = resharder
        example = next(node.meta["val"] for node in flow.graph.graph_module.graph.nodes if node.op == "placeholder")
        arguments = flow.mesh, groups, example.fake_mode, home, self.sizes
        self.emit = GraphEmitter(*arguments) if shared is None else SharesEmitter(*arguments, shared)
        self._shared = shared
        self.nodes: dict[str, fx.Node] = {}  # key of a value or copy -> the node that holds it
        self.results: dict[tuple[str, str], fx.Node] = {}  # kind and name of an output -> the node that holds it
        self._gradient_roots: set[fx.Node] = set()  # nodes whose memory is a gradient
        self._streams: dict[str, int] = {}  # operator -> count of random operators emitted before it
        self._zero_padded: set[fx.Node] = set()  # nodes in which all padding is zero
        # Node and phase -> its tensor with zeros for padding. Backward makes its own, so that none is saved for it.
        self._zero_padded_copies: dict[tuple[fx.Node, str], fx.Node] = {}

    def run(self) -> LocalStep:
        """Emit the whole program."""
        inputs = self._add_inputs()
        # Inputs that the step returns.
        for source in self.flow.graph.inputs:
            if source.kind != "tangent":
                self._emit_outputs(Value(source.node))
        for node in self.rules.operators:
            try:
                self._localize_operator(node)
            except RuntimeError as error:  # of torch: shapes do not fit each other
                place = node_place(node, "has no program on the shards that were planned")
                raise RuleError(f"{place}: {error}") from error
            for index in range(len(self.rules.calls[node].results)):
                self._emit_outputs(Value(node, index))
        # Tangents that are gradients as they arrive: no backward node may stand before forward ones.
        for source in self.flow.graph.inputs:
            if source.kind == "tangent":
                self._emit_outputs(Value(source.node))
        outputs = [
            self._program_tensor(output.kind, output.name, value, self.flow.output_spec(output))
            for kind in ("output", "mutation", "gradient")
            for output in self.flow.graph.outputs
            if output.kind == kind and output.node is not None
            for value in (value_of(output.node),)
        ]
        self.emit.graph.output(tuple(self.results[border.kind, border.name] for border in outputs))
        module = lazy_graph_module(self.emit.graph)
        gathers_again = any(key.endswith("@backward") for key in self.flow.decisions.hubs)
        repeats = gathers_again or bool(self.flow.graph.recomputed)
        sources = self.flow.graph.gradient_sources
        return LocalStep(module, tuple(inputs), tuple(outputs), repeats, self._shared, sources)

    def _emit_outputs(self, value: Value) -> None:
        """Reshard a value that the step returns, as soon as it is made, so that later compute hides its reduction."""
        for output in self.rules.outputs_of.get(value, ()):
            gradient = output.kind == "gradient"
            result = self._read(value, phase_of(output), self.flow.output_spec(output), gradient)
            self.results[output.kind, output.name] = self._unaliased_gradient(result) if gradient else result

    def _unaliased_gradient(self, gradient: fx.Node) -> fx.Node:
        """Return the gradient in contiguous memory of its own, since optimizers and clipping change it in place."""
        root = _view_root(gradient)
        fresh = root.op != "placeholder" and root not in self._gradient_roots
        self._gradient_roots.add(root)
        # A collective writes its result to contiguous memory.
        if fresh and (gradient.target is _WAIT or self.emit.is_contiguous(gradient)):
            return gradient
        return self.emit.call(torch.ops.aten.clone.default, gradient, memory_format=torch.contiguous_format)

    def _add_inputs(self) -> list[ProgramTensor]:
        primals = [source for source in self.flow.graph.inputs if source.kind != "tangent"]
        tangents = [source for source in self.flow.graph.inputs if source.kind == "tangent"]
        # Torch's partitioner knows inputs of the forward and tangents by these names.
        borders = [self._add_input(source, f"primals_{index}") for index, source in enumerate(primals)]
        self.emit.add_rank_inputs()
        return borders + [self._add_input(source, f"tangents_{index}") for index, source in enumerate(tangents)]

    def _add_input(self, source: JointInput, name: str) -> ProgramTensor:
        value = Value(source.node)
        spec = self.flow.produced_spec(value)
        border = self._program_tensor(source.kind, source.name, value, spec)
        node = self.emit.placeholder(name, border.local_shape(self.flow.mesh), border.dtype)
        if source.kind == "parameter":
            node.meta["layer"] = self.rules.parameter_layers[source.name]
        self.nodes[value.name] = node
        self._zero_padded.add(node)  # inputs are padded with zeros
        return border

    def _program_tensor(self, kind: str, name: str, value: Value, spec: Spec) -> ProgramTensor:
        meta = self._meta(value)
        share = None
        if isinstance(self.emit, SharesEmitter):
            local = self.emit.shape_with_shares(local_shape(meta.shape, spec, self.flow.mesh))
            share = local if self.emit.shared.is_shared(local) else None
        return ProgramTensor(kind, name, meta.shape, meta.dtype, spec, share)

    def _meta(self, value: Value) -> TensorMeta:
        return at(value.meta, self.sizes)

    def _localize_operator(self, node: fx.Node) -> None:
        phase = self.flow.graph.phase(node)
        operands = [
            self._read(value_of(source), phase, self.flow.consumed_spec(node, operand))
            for operand, source in enumerate(operand_nodes(node))
        ]
        self.emit.phase = phase
        # `autoshard.shard` is the identity: its operand was read in the pinned spec.
        if self.rules.pin_spec(node, self.flow.mesh) is not None:
            self.nodes[Value(node).name] = operands[0]
            return
        choices = self.flow.decisions.choices[node.name]
        rule = self.rules.rules[node]
        if self._shared is not None and not keeps_shares(rule, choices[self._shared.axis], self._shared):
            axis = self.flow.mesh.names[self._shared.axis]
            raise PlanError(
                f"this plan splits {node.target} by other than {self._shared.whole} on axis {axis!r}, which shares "
                "that unevenly: plan with the same shares, or leave them out."
            )
        operands = [self._zero_padded_copies.get((operand, phase), operand) for operand in operands]
        call = LocalCall(
            *(self.rules.calls[node], rule, choices, self.flow.mesh, self.emit, operands),
            zeros=[operand in self._zero_padded for operand in operands],
        )
        fill_operands(call)
        # Operands whose padding was filled with zeros serve later operators, too.
        for operand, value, zero in zip(operands, unwrap(call.operands), call.zeros, strict=True):
            if zero and value is not operand:
                self._zero_padded_copies[operand, phase] = value
                self._zero_padded.add(value)
        padded = padded_factors(call.rule, call.choices, call.mesh)
        zeros = zero_padded_results(call.rule, padded, call.zeros)
        results = self._emit_operator(node, call)
        for index, result in enumerate(results if isinstance(results, (tuple, list)) else (results,)):
            if result is not None:
                self.nodes[Value(node, index).name] = result
                if zeros[index]:
                    self._zero_padded.add(result)

    def _emit_operator(self, node: fx.Node, call: LocalCall) -> Any:
        """Emit an operator; one that is run again draws the numbers that it drew the first time."""
        # A kernel that draws from the device's own generator would draw new numbers: its first results are used.
        first = self.rules.original_draw(node)
        if first is not None and call.rule.local is None:
            return [self.nodes.get(Value(first, index).name) for index in range(len(call.call.results))]
        streams = self.emit.streams
        # A repeated operator draws from the streams of the original; later ones count on from the largest number.
        self._streams[node.name] = self.emit.streams = self._streams.get(node.meta.get(RECOMPUTES, ""), streams)
        results = emit_program(call)
        self.emit.streams = max(streams, self.emit.streams)
        return results

    def _read(self, value: Value, phase: str, target: Spec, gradient: bool = False) -> fx.Node:
        """Return the value in spec `target`, for an optimizer if it is a `gradient`; equal copies are made once."""
        self.emit.phase = phase
        node, meta = self.nodes[value.name], self._meta(value)
        for key, source, spec in self.flow.reshards(value, phase, target):
            if key not in self.nodes:
                resharder = self.resharder.gradients if gradient and spec is target else self.resharder
                # The cheapest path at the rules' sizes, whatever those of this program: it is one for all sizes.
                generic, plain = self.rules.generic, at(value.meta, self.rules.generic)
                path = resharder.path(plain.shape, plain.dtype.itemsize, source.at(generic), spec.at(generic))
                path = path.at(self.sizes)
                self.nodes[key] = lower(path, node, self.emit, meta.dtype)
                if node in self._zero_padded and all(_keeps_zeros(step) for step in path.steps):
                    self._zero_padded.add(self.nodes[key])
            node = self.nodes[key]
        return node


def _keeps_zeros(step: Step) -> bool:
    """Return True if a step of a reshard keeps zero padding zero, and pads with zeros."""
    # A partial product of ranks is completed with ones.
    return step.kind != "make_partial" or "P(product)" not in str(step.target)


def _view_root(node: fx.Node) -> fx.Node:
    """Return the node of which a node is a view, through any number of views, or itself."""
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    if call.op != "call_function" or not makes_view(call.target):
        return node
    return _view_root(call.all_input_nodes[0])
