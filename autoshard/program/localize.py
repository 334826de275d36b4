"""The program that every rank runs on its shards: forward and backward in one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from autoshard.capture.capture_device import DEVICE
from autoshard.capture.joint import JointInput
from autoshard.capture.recomputation import RECOMPUTES
from autoshard.errors import PlanError
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value, value_of
from autoshard.patterns.local import LocalCall
from autoshard.patterns.strategy import keeps_shares
from autoshard.program._torch import lazy_graph_module
from autoshard.program.graph_emitter import GraphEmitter, SharesEmitter
from autoshard.program.walk import LocalResults, ProgramWalk, emit_operator
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path, Resharder
from autoshard.size import Sizes, at
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import is_even, local_shape
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor that enters or leaves the program.

    Attributes:
        kind: of the joint graph's input or output: `"parameter"`, `"input"`, `"gradient"`, ...
        name: parameter, buffer, input or output path.
        shape: global shape.
        dtype: element type.
        spec: its placements.
        share: the local shape, if the rank holds an unequal share of a dynamic size.
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

    Dynamic sizes are `DynamicSize`s in shapes and in the graph's arguments.

    Attributes:
        graph_module: takes the `inputs` except tangents, then the rank's coordinates on the program's device and on
            the host, the step's seed, and the tangents; returns the `outputs`.
        inputs: tangents last.
        outputs: forward ones first.
        shared: the axis whose ranks hold unequal shares of a dynamic size, if any.
        gradient_sources: for every gradient by name, the outputs from whose tangents it is computed.
        former_values: names of the changed tensors on whose former values the step's results depend.
    """

    graph_module: fx.GraphModule
    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    shared: SharedAxis | None = None
    gradient_sources: Mapping[str, frozenset[str]] = field(default_factory=dict)
    former_values: frozenset[str] = frozenset()
    # Cached, since every step reads them.
    forward_outputs: tuple[ProgramTensor, ...] = field(init=False)
    gradients: tuple[ProgramTensor, ...] = field(init=False)
    tangents: tuple[ProgramTensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        chosen = {
            "forward_outputs": (border for border in self.outputs if border.kind != "gradient"),
            "gradients": (border for border in self.outputs if border.kind == "gradient"),
            "tangents": (border for border in self.inputs if border.kind == "tangent"),
        }
        for name, borders in chosen.items():
            object.__setattr__(self, name, tuple(borders))


def localize(
    flow: Flow,
    resharder: Resharder,
    groups: Sequence[str],
    home: torch.device = DEVICE,
    sizes: Sizes | None = None,
    shared: SharedAxis | None = None,
) -> LocalStep:
    """Rewrite the joint graph of whole tensors as the program of a rank, by the decisions of a plan.

    Args:
        flow: the graph, its rules and the decisions.
        resharder: finds the reshards; the one that priced them.
        groups: for every mesh axis, the name of the process group of this rank's line along it.
        home: the device of the program's tensors: of this rank, or of its type.
        sizes: representative values for dynamic sizes; by default those of the rules.
        shared: the axis whose ranks hold unequal shares, if any.

    Raises:
        PlanError: an operator can't have unequal shares as the plan has it.
        RuleError: an operator can't run on the shards that were planned.
    """
    sizes = flow.rules.generic if sizes is None else sizes
    flow = flow.at(sizes)
    example = next(node.meta["val"] for node in flow.graph.graph_module.graph.nodes if node.op == "placeholder")
    arguments = flow.mesh, groups, example.fake_mode, home, sizes
    emit = GraphEmitter(*arguments) if shared is None else SharesEmitter(*arguments, shared)
    program = _JointProgram(flow, emit, shared)
    walk = ProgramWalk(flow, resharder, program, sizes)

    def program_tensor(kind: str, name: str, value: Value, spec: Spec) -> ProgramTensor:
        meta, share = at(value.meta, sizes), None
        if isinstance(emit, SharesEmitter):
            local = emit.shape_with_shares(local_shape(meta.shape, spec, flow.mesh))
            share = local if emit.shared.is_shared(local) else None
        return ProgramTensor(kind, name, meta.shape, meta.dtype, spec, share)

    def add_inputs(sources: Sequence[JointInput], name: str) -> list[ProgramTensor]:
        tensors = []
        for index, source in enumerate(sources):
            value = Value(source.node)
            tensor = program_tensor(source.kind, source.name, value, flow.produced_spec(value))
            walk.add_input(source, emit.placeholder(f"{name}_{index}", tensor.local_shape(flow.mesh), tensor.dtype))
            tensors.append(tensor)
        return tensors

    # Torch's partitioner recognises inputs of the forward and tangents by these names.
    inputs = add_inputs([source for source in flow.graph.inputs if source.kind != "tangent"], "primals")
    emit.add_rank_inputs()
    inputs += add_inputs([source for source in flow.graph.inputs if source.kind == "tangent"], "tangents")
    results = walk.run()
    outputs = [
        program_tensor(output.kind, output.name, value_of(output.node), flow.output_spec(output))
        for kind in ("output", "mutation", "gradient")
        for output in flow.graph.outputs
        if output.kind == kind and output.node is not None
    ]
    emit.graph.output(tuple(results[tensor.kind, tensor.name] for tensor in outputs))
    dependences = flow.graph.gradient_sources, flow.graph.former_values
    return LocalStep(lazy_graph_module(nn.Module(), emit.graph), tuple(inputs), tuple(outputs), shared, *dependences)


class _JointProgram:
    """A `ProgramGraph` of both halves, which torch's partitioner splits."""

    def __init__(self, flow: Flow, emit: GraphEmitter, shared: SharedAxis | None) -> None:
        self.flow = flow
        self.emit = emit
        self.shared = shared
        # Operator -> count of random operators emitted before it.
        self._streams: dict[str, int] = {}

    def enter(self, position: int, phase: str, key: str, kind: str) -> None:
        self.emit.phase = phase

    def add_operator(self, node: fx.Node, operands: Sequence[fx.Node], zeros: Sequence[bool]) -> LocalResults:
        rule, choices = self.flow.rules.rules[node], self.flow.decisions.choices[node.name]
        if self.shared is not None and not keeps_shares(rule, choices[self.shared.axis], self.shared):
            axis = self.flow.mesh.names[self.shared.axis]
            raise PlanError(
                f"this plan splits {node.target} by other than {self.shared.whole} on axis {axis!r}, which shares "
                "that unevenly: plan with the same shares, or leave them out."
            )
        call = LocalCall(self.flow.rules.calls[node], rule, choices, self.flow.mesh, self.emit, operands, zeros)
        # A rerun operator draws from the streams of the first run; later ones continue from the largest.
        streams = self.emit.streams
        self._streams[node.name] = self.emit.streams = self._streams.get(node.meta.get(RECOMPUTES, ""), streams)
        results = emit_operator(call)
        self.emit.streams = max(streams, self.emit.streams)
        return results

    def add_reshard(self, path: Path, node: fx.Node) -> fx.Node:
        result: fx.Node = lower(path, node, self.emit, node.meta["val"].dtype)
        return result

    def add_copy(self, node: fx.Node) -> fx.Node:
        copy: fx.Node = self.emit.call(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
        return copy

    def local_view(self, node: fx.Node) -> fx.Node:
        return node
