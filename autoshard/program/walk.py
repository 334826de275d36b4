"""The walk over a joint graph that makes a rank's program of some decisions, independently of the target graph."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from autoshard.capture.capture_device import DEVICE
from autoshard.capture.capture_errors import node_place
from autoshard.capture.host_copies import TO_DEVICE
from autoshard.capture.joint import JointGraph, JointInput
from autoshard.errors import RuleError
from autoshard.patterns.decisions import Flow, phase_of
from autoshard.patterns.graph_rules import Value, uncast
from autoshard.patterns.local import LocalCall, emit_program, unwrap
from autoshard.patterns.padding import fill_operands, padded_factors, zero_padded_results
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.strategy import Choices, resolve_variant
from autoshard.program._torch import FakeTensor
from autoshard.program.aliasing import storage_root
from autoshard.program.graph_emitter import GraphEmitter
from autoshard.program.program_replay import COLLECTIVE_KINDS
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path, Resharder, Step
from autoshard.size import Sizes, at, plain
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from autoshard.specs.spec import Spec

_WAIT = collectives.wait_tensor.default


class LocalResults(NamedTuple):
    """The nodes of the local program of one operator.

    Attributes:
        operands: the operands, with padding replaced where the operator would mix it into results.
        operand_zeros: for each of these, True if all padding in it is zero.
        results: the results; None for missing ones.
        zeros: for each of these, True if all padding in it is zero.
    """

    operands: tuple[fx.Node, ...]
    operand_zeros: tuple[bool, ...]
    results: tuple[fx.Node | None, ...]
    zeros: tuple[bool, ...]


def emit_operator(call: LocalCall) -> LocalResults:
    """Emit an operator on the shards, or its rule's local program."""
    fill_operands(call)
    padded = padded_factors(call.rule, call.choices, call.mesh)
    results = emit_program(call)
    results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    zeros = zero_padded_results(call.rule, padded, call.zeros)
    return LocalResults(unwrap(call.operands), tuple(call.zeros), results, zeros)


class ProgramGraph(Protocol):
    """The graph, or the two halves, that a walk adds the calls of a program to."""

    def enter(self, position: int, phase: str, key: str, kind: str) -> None:
        """Begin the calls of a value or copy.

        Args:
            position: the number of the operator of the joint graph that they belong to.
            phase: `"forward"` or `"backward"`.
            key: the name of the value or copy.
            kind: `"gathered"`, `"communication"` or `"temporary"`: the purpose of tensors that are made.
        """

    def add_operator(self, node: fx.Node, operands: Sequence[fx.Node], zeros: Sequence[bool]) -> LocalResults:
        """Add the local program of an operator of the joint graph; `zeros` tells which operands have zero padding."""

    def add_reshard(self, path: Path, node: fx.Node) -> fx.Node:
        """Add the steps of a reshard."""

    def add_copy(self, node: fx.Node) -> fx.Node:
        """Add a contiguous copy of a tensor."""

    def local_view(self, node: fx.Node) -> fx.Node:
        """Return the node by which the current half reads a tensor, which the other half may have made."""


class ProgramWalk:
    """Makes the program of the decisions of a plan.

    Every reshard is put where its first user needs it, and every output is resharded as soon as it exists, so that
    later compute hides its reduction.

    Args:
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards; the one that priced them.
        graph: takes the calls.
        sizes: dynamic sizes at which the program is made; empty for those of the example.
    """

    def __init__(self, flow: Flow, resharder: Resharder, graph: ProgramGraph, sizes: Sizes) -> None:
        self.flow = flow
        self.rules = flow.rules
        self.resharder = resharder
        self.graph = graph
        self.sizes = sizes
        # Kind and name of an output -> the node that holds it.
        self.outputs: dict[tuple[str, str], fx.Node] = {}
        self._position = 0
        # Key of a value or copy -> the node that holds it.
        self._nodes: dict[str, fx.Node] = {}
        # Nodes whose memory is a gradient.
        self._gradient_roots: set[fx.Node] = set()
        # Nodes in which all padding is zero.
        self._zero_padded: set[fx.Node] = set()
        # Node and phase -> its tensor with zeros for padding; a copy per phase, so that none is saved for backward.
        self._zero_padded_copies: dict[tuple[fx.Node, str], fx.Node] = {}

    def add_input(self, source: JointInput, node: fx.Node) -> None:
        """Register a node as an input of the step; inputs are padded with zeros."""
        if source.kind == "parameter":
            node.meta["layer"] = self.rules.parameter_layers[source.name]
        self._nodes[Value(source.node).name] = node
        self._zero_padded.add(node)

    def run(self) -> dict[tuple[str, str], fx.Node]:
        """Add the whole program after its inputs; return the nodes of its outputs by kind and name.

        Raises:
            RuleError: an operator can't run on the shards that were planned.
        """
        inputs = self.flow.graph.inputs
        for source in inputs:
            if source.kind != "tangent":
                self._add_outputs(Value(source.node))
        handed_back: dict[fx.Node, list[Value]] = {}
        for value in self.rules.outputs_of:
            handed_back.setdefault(value.node, []).append(value)
        for position, node in enumerate(self.rules.operators):
            self._position = position
            try:
                self._add_operator(node)
            # From torch, for incompatible shapes.
            except RuntimeError as error:
                place = node_place(node, "has no program on the shards that were planned")
                raise RuleError(f"{place}: {error}") from error
            for value in sorted(handed_back.get(node, ())):
                self._add_outputs(value)
        # Outputs that are unchanged tangents, last: no backward node may precede forward ones.
        for source in inputs:
            if source.kind == "tangent":
                self._add_outputs(Value(source.node))
        return self.outputs

    def _add_operator(self, node: fx.Node) -> None:
        rules, nodes, zero_padded = self.rules, self._nodes, self._zero_padded
        phase, gradient = self.flow.graph.phase(node), rules.restores_dtype(node)
        if node.target is TO_DEVICE:
            self._copy_back(node, phase)
            return
        operands = [
            self._read(value, phase, spec, gradient)
            for value, spec in zip(rules.operands[node], self.flow.consumed_specs(node), strict=True)
        ]
        # `autoshard.shard` is the identity: its operand was read in the pinned spec.
        if rules.pin_spec(node, self.flow.mesh) is not None:
            nodes[Value(node).name] = operands[0]
            return
        # A kernel that draws from the device's generator would draw new numbers: use its first results.
        first = rules.original_draw(node)
        if first is not None:
            rule, _ = resolve_variant(rules.rules[node], self.flow.decisions.choices[node.name])
            if rule.local is None:
                for index in range(len(rules.calls[node].results)):
                    if Value(first, index).name in nodes:
                        nodes[Value(node, index).name] = nodes[Value(first, index).name]
                return
        self.graph.enter(self._position, phase, node.name, "temporary")
        if self._zero_padded_copies:
            operands = [self._zero_padded_copies.get((operand, phase), operand) for operand in operands]
        local = self.graph.add_operator(node, operands, [operand in zero_padded for operand in operands])
        # Later operators reuse operands whose padding was filled with zeros.
        for operand, filled, zero in zip(operands, local.operands, local.operand_zeros, strict=True):
            if filled is not operand and zero:
                self._zero_padded_copies[operand, phase] = filled
                zero_padded.add(filled)
        for index, result in enumerate(local.results):
            if result is not None:
                nodes[Value(node, index).name] = result
                if local.zeros[index]:
                    zero_padded.add(result)

    def _copy_back(self, node: fx.Node, phase: str) -> None:
        """Copy a value from the host, and then reshard it to the operator's result spec."""
        # A reshard runs between devices, so the copy comes first.
        (value,) = self.rules.operands[node]
        host = self._nodes[value.name]
        self.graph.enter(self._position, phase, node.name, "temporary")
        (copy,) = self.graph.add_operator(node, [host], [host in self._zero_padded]).results
        assert copy is not None
        if host in self._zero_padded:
            self._zero_padded.add(copy)
        self._nodes[value.name] = copy
        self._nodes[Value(node).name] = self._read(value, phase, self.flow.consumed_spec(node, 0))

    def _read(self, value: Value, phase: str, target: Spec, gradient: bool = False) -> fx.Node:
        """Return the value in spec `target`, for an optimizer or its cast if `gradient`; copies are shared."""
        nodes = self._nodes
        node = nodes[value.name]
        for key, source, spec in self.flow.reshards(value, phase, target):
            if key not in nodes:
                resharder = self.resharder.gradients if gradient and spec is target else self.resharder
                nodes[key] = self._reshard(value, phase, key, node, self._path(resharder, value, source, spec))
            node = nodes[key]
        return node

    def _path(self, resharder: Resharder, value: Value, source: Spec, target: Spec) -> Path:
        # The cheapest path at the rules' sizes, not this program's, so that it is the same for all sizes.
        generic = self.rules.generic if self.sizes else {}
        meta = at(value.meta, generic)
        path = resharder.path(meta.shape, meta.dtype.itemsize, source.at(generic), target.at(generic))
        return path.at(self.sizes)

    def _reshard(self, value: Value, phase: str, key: str, node: fx.Node, path: Path) -> fx.Node:
        if not path.steps:
            return node
        self.graph.enter(
            self._position, phase, key, "gathered" if uncast(value.node).op == "placeholder" else "communication"
        )
        result = self.graph.add_reshard(path, node)
        if node in self._zero_padded and all(_keeps_zeros(step) for step in path.steps):
            self._zero_padded.add(result)
        return result

    def _add_outputs(self, value: Value) -> None:
        """Reshard a value to the specs of its outputs."""
        for output in self.rules.outputs_of.get(value, ()):
            gradient = output.kind == "gradient"
            result = self._read(value, phase_of(output), self.flow.output_spec(output), gradient)
            self.outputs[output.kind, output.name] = self._unaliased_gradient(result, value) if gradient else result

    def _unaliased_gradient(self, gradient: fx.Node, value: Value) -> fx.Node:
        """Return the gradient contiguous and without aliases, since optimizers and clipping change it in place."""
        self.graph.enter(self._position, "backward", value.name, "temporary")
        root = storage_root(self.graph.local_view(gradient))
        fresh = root.op != "placeholder" and root not in self._gradient_roots
        self._gradient_roots.add(root)
        val: torch.Tensor = gradient.meta["val"]
        # A collective writes its result to contiguous memory.
        if fresh and (gradient.target is _WAIT or val.is_contiguous()):
            return gradient
        return self.graph.add_copy(gradient)


def _keeps_zeros(step: Step) -> bool:
    """Return True if a step of a reshard keeps zero padding zero, and pads with zeros."""
    # Partial products are padded with ones.
    return step.kind != "make_partial" or "P(product)" not in str(step.target)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A local program that can be added to graphs repeatedly.

    Attributes:
        inputs: its operands, the rank's coordinates and the seed.
        calls: the calls, in order, with operator, arguments, keyword arguments and fake tensor.
        local: its nodes; for a reshard, one result.
        stand_for: the calls that are not collectives, if it is a rule's local program; None if it is the operator
            itself, or a reshard.
        reads_rank: True if it reads or returns the rank's coordinates or the seed.
    """

    inputs: tuple[fx.Node, ...]
    calls: tuple[tuple[fx.Node, Any, tuple[Any, ...], dict[str, Any], Any], ...]
    local: LocalResults
    stand_for: tuple[fx.Node, ...] | None
    reads_rank: bool


class _Recorder(GraphEmitter):
    """An emitter whose graph is the local program of one operator or reshard.

    Groups have the names of their axes. A coordinate is one input, wherever it is read.
    """

    def __init__(self, programs: LocalPrograms, operands: Sequence[torch.Tensor]) -> None:
        super().__init__(programs.mesh, programs.mesh.names, programs.mode, DEVICE, results=programs.results)
        number = programs.empty((), torch.int64)
        self.inputs: list[fx.Node] = []
        for index, val in enumerate((*operands, *[number] * (self.mesh.ndim + 1))):
            self.inputs.append(self.graph.placeholder(f"input_{index}"))
            self.inputs[-1].meta["val"] = val
        self.operands = self.inputs[: len(operands)]
        self._coordinates = self._host_coordinates = self.inputs[len(operands) : -1]
        self._seed = self.inputs[-1]

    def recording(self, local: LocalResults, own: bool = False) -> Recording:
        """Return the program; `own` is True for a rule's local program."""
        nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        calls = tuple((node, node.target, node.args, node.kwargs, node.meta["val"]) for node in nodes)
        computing = (node for node in nodes if node.target is not _WAIT and node.target not in COLLECTIVE_KINDS)
        reads_rank = any(node.users or node in local.results for node in self.inputs[len(self.operands) :])
        return Recording(tuple(self.inputs), calls, local, tuple(computing) if own else None, reads_rank)


class LocalPrograms:
    """Recordings by what they depend on: the call, the strategy, the shapes and strides of operands.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
    """

    def __init__(self, graph: JointGraph, mesh: MeshShape) -> None:
        values = (node.meta.get("val") for node in graph.graph.nodes)
        self.mesh = mesh
        self.mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        # Fake tensors of calls, which all recordings share.
        self.results: dict[Hashable, Any] = {}
        self._operators: dict[Hashable, Recording] = {}
        # A tensor's identity is a cheaper key than its shape and strides.
        self._by_identity: dict[Hashable, Recording] = {}
        self._empty: dict[Hashable, torch.Tensor] = {}
        self._reshards: dict[Hashable, Recording] = {}
        # Keeps objects alive that are keyed by id, so that ids are not reused.
        self._keep_alive: list[object] = []

    def operator(
        self, call: OpCall, rule: Rule, choices: Choices, operands: Sequence[torch.Tensor], zeros: Sequence[bool]
    ) -> Recording:
        """Return the local program of an operator on operands with these layouts."""
        identity = (id(call), id(rule), choices, tuple(zeros), tuple(map(id, operands)))
        recording = self._by_identity.get(identity)
        if recording is None:
            key = (*identity[:-1], tuple(map(_layout, operands)))
            if key not in self._operators:
                recorder = _Recorder(self, operands)
                local = LocalCall(call, rule, choices, self.mesh, recorder, recorder.operands, zeros)
                own = resolve_variant(rule, choices)[0].local is not None
                self._operators[key] = recorder.recording(emit_operator(local), own)
            self._keep_alive += [call, rule, *operands]
            recording = self._by_identity[identity] = self._operators[key]
        return recording

    def reshard(self, path: Path, value: torch.Tensor) -> Recording:
        """Return the steps of a path on a local tensor with this layout."""
        key = (id(path), _layout(value))
        if key not in self._reshards:
            self._keep_alive.append(path)
            recorder = _Recorder(self, [value])
            result = lower(path, recorder.operands[0], recorder, value.dtype)
            self._reshards[key] = recorder.recording(LocalResults((), (), (result,), ()))
        return self._reshards[key]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the contiguous fake tensor of a shape, always the same object, so that calls on it have equal keys."""
        key = (tuple(int(plain(size)) for size in shape), dtype)
        if key not in self._empty:
            with self.mode:
                self._empty[key] = torch.empty(key[0], dtype=dtype, device=DEVICE)
        return self._empty[key]


def _layout(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
