"""The predicted program of some decisions: the walk of the real program, which adds recordings to both halves.

A step's memory and seconds depend on every call: temporaries of local programs, buckets of gradients, gathers that
start early. A prediction takes a fraction of the time of the program, since equal operators are recorded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.capture import outside_modes
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value
from autoshard.program._torch import append_node
from autoshard.program.aliasing import write_in_place
from autoshard.program.cheap_saves import compute_where_read
from autoshard.program.copy_schedule import schedule_copies
from autoshard.program.walk import LocalPrograms, LocalResults, ProgramWalk, Recording
from autoshard.reshard.collective_schedule import propagate_layers, schedule
from autoshard.reshard.path import Path, Resharder
from autoshard.reshard.reductions import (
    DeferredReduction,
    PendingReductions,
    bucket_reductions,
    drop_unused,
    take_reductions,
)
from autoshard.specs.layout import local_shape

_TAGS = {"forward": "is_forward", "backward": "is_backward"}  # of torch's partitioner
_map_arg = fx.node.map_arg


@dataclass(eq=False)
class Half:
    """The forward or the backward half.

    Attributes:
        graph: its calls. Nodes have in `meta`: `"val"`, the fake tensor; `"position"`, the number of the operator that
            they belong to; `"key"`, the name of the value or copy that they are, or are part of; `"kind"`, the default
            purpose of tensors made there.
        saved: in the backward half, placeholder -> its node in the forward half.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    saved: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class PredictedProgram:
    """Both halves of the program of some decisions.

    Attributes:
        forward: the forward half.
        backward: the backward half.
        inputs: nodes of the step's inputs, by the names of the joint graph's placeholders.
        outputs: (kind, name) of an output -> its node, in the half that makes it.
        unreduced: the deferred reductions of gradients that are summed first; None without such gradients.
        compiled: True if the program that runs is compiled.
    """

    forward: Half
    backward: Half
    inputs: dict[str, fx.Node]
    outputs: dict[tuple[str, str], fx.Node]
    unreduced: PendingReductions | None = None
    compiled: bool = False


def predict_program(
    flow: Flow,
    resharder: Resharder,
    programs: LocalPrograms,
    reduced: DeferredReduction | None = None,
    compiled: bool = False,
) -> PredictedProgram:
    """Return the predicted program of some decisions, split into halves and scheduled as the real program.

    Args:
        flow: the graph and the decisions.
        resharder: finds the reshards.
        programs: the recordings of operators and reshards.
        reduced: which gradients of parameters are summed over several runs before they are reduced, if any.
        compiled: True if the program is compiled: it writes into no inputs, and copies to and from the host are not
            concurrent with compute.
    """
    with outside_modes():
        halves = _PredictedHalves(flow, programs)
        walk = ProgramWalk(flow, resharder, halves, {})
        inputs = {}
        for source in flow.graph.inputs:
            value = Value(source.node)
            half = "backward" if source.kind == "tangent" else "forward"
            shape = local_shape(value.meta.shape, flow.produced_spec(value), flow.mesh)
            inputs[source.node.name] = halves.add_placeholder(half, source.node.name, shape, value.meta.dtype)
            walk.add_input(source, inputs[source.node.name])
        halves.add_rank_inputs()
        outputs = walk.run()
        unreduced = halves.finish(outputs, reduced, compiled)
        if not compiled and not flow.graph.gradients and not flow.graph.result.checks:
            sources = {source.name: inputs[source.node.name] for source in flow.graph.inputs}
            write_in_place((sources[name], node) for (kind, name), node in outputs.items() if kind == "mutation")
        return PredictedProgram(
            halves.halves["forward"], halves.halves["backward"], inputs, outputs, unreduced, compiled
        )


class _PredictedHalves:
    """A `ProgramGraph` with one graph for each half, to which recordings of local programs are added."""

    def __init__(self, flow: Flow, programs: LocalPrograms) -> None:
        self.flow = flow
        self.programs = programs
        self.halves = {"forward": Half(), "backward": Half()}
        self._phase = "forward"
        self._graph = self.halves["forward"].graph
        self._calls = 0
        self._position = 0
        self._key = ""
        self._kind = "temporary"
        self._rank_inputs: list[fx.Node] = []
        self._saved_placeholders: dict[fx.Node, fx.Node] = {}
        # The operator that a rule's local program replaces, and the calls of that program.
        self._local_calls: list[tuple[tuple[Any, ...], list[fx.Node]]] = []

    def add_placeholder(self, half: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Add an input to a half."""
        node = self.halves[half].graph.placeholder(name)
        self._set_meta(node, half, self.programs.empty(shape, dtype))
        return node

    def add_rank_inputs(self) -> None:
        """Add the rank's coordinates and the seed."""
        names = (*self.flow.mesh.names, "seed")
        self._rank_inputs = [self.add_placeholder("forward", f"rank_{name}", (), torch.int64) for name in names]

    def enter(self, position: int, phase: str, key: str, kind: str) -> None:
        self._position, self._phase, self._key, self._kind = position, phase, key, kind
        self._graph = self.halves[phase].graph

    def add_operator(self, node: fx.Node, operands: Sequence[fx.Node], zeros: Sequence[bool]) -> LocalResults:
        rules, choices = self.flow.rules, self.flow.decisions.choices[node.name]
        call, rule = rules.calls[node], rules.rules[node]
        vals = [operand.meta["val"] for operand in operands]
        recording = self.programs.operator(call, rule, choices, vals, zeros)
        nodes = self._play(recording, operands)
        if recording.stand_for is not None:
            calls = [nodes[each] for each in recording.stand_for]
            for each in calls:
                each.meta["stands_for"] = ()
            self._local_calls.append(((call, rule, choices, rules.zeros[node]), calls))
        local, made = recording.local, nodes.__getitem__
        return LocalResults(
            tuple(map(made, local.operands)), local.operand_zeros, tuple(map(made, local.results)), local.zeros
        )

    def add_reshard(self, path: Path, node: fx.Node) -> fx.Node:
        recording = self.programs.reshard(path, node.meta["val"])
        (result,) = recording.local.results
        return self._play(recording, [node])[result]

    def add_copy(self, node: fx.Node) -> fx.Node:
        val: torch.Tensor = node.meta["val"]
        return self._call(
            torch.ops.aten.clone.default, (self.local_view(node),), {}, self.programs.empty(val.shape, val.dtype)
        )

    def local_view(self, node: fx.Node) -> fx.Node:
        """Return the node in this half: results of the forward half are saved for the backward half."""
        if self._phase == "forward":
            return node
        graph = self.halves["backward"].graph
        if node.graph is graph:
            return node
        placeholder = self._saved_placeholders.get(node)
        if placeholder is None:
            first, name = next(iter(graph.nodes), None), f"saved_{node.name}"
            placeholder = self._saved_placeholders[node] = append_node(graph, "placeholder", name, name)
            if first is not None:
                first.prepend(placeholder)
            self._set_meta(placeholder, "backward", node.meta["val"])
            self.halves["backward"].saved[placeholder] = node
        return placeholder

    def _play(self, recording: Recording, operands: Sequence[fx.Node]) -> dict[fx.Node | None, fx.Node]:
        """Add a recording to the half, and return the map from its nodes to those of the half."""
        given = (*operands, *self._rank_inputs) if recording.reads_rank else operands
        if self._phase == "backward":
            given = list(map(self.local_view, given))
        nodes: dict[fx.Node | None, Any] = dict(zip(recording.inputs, given, strict=False))
        made = nodes.__getitem__
        for node, op, args, kwargs, val in recording.calls:
            nodes[node] = self._call(op, _map_arg(args, made), _map_arg(kwargs, made) if kwargs else kwargs, val)
        # A program that returns an operand returns the node of the half that makes it.
        nodes.update(zip(recording.inputs, operands, strict=False))
        nodes[None] = None  # for missing results of the operator
        return nodes

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        self._calls += 1
        node = append_node(self._graph, "call_function", f"call_{self._calls}", op, args, kwargs)
        self._set_meta(node, self._phase, val)
        return node

    def _set_meta(self, node: fx.Node, half: str, val: Any) -> None:
        key, tag = self._key or node.name, _TAGS[half]
        node.meta.update(val=val, position=self._position, key=key, kind=self._kind, partitioner_tag=tag)

    def finish(
        self, outputs: dict[tuple[str, str], fx.Node], reduced: DeferredReduction | None, compiled: bool
    ) -> PendingReductions | None:
        """Drop unused calls from both halves, and schedule collectives; update the nodes of gradients in `outputs`."""
        forward, backward = self.halves["forward"], self.halves["backward"]
        self._phase = "backward"
        names = [name for name in outputs if name[0] == "gradient"]
        backward.graph.output(tuple(self.local_view(outputs[name]) for name in names))
        drop_unused(backward.graph)
        for placeholder in [saved for saved in backward.saved if not saved.users]:
            backward.graph.erase_node(placeholder)
            del backward.saved[placeholder]
        if compiled:
            for placeholder in compute_where_read(backward.graph, backward.saved):
                del backward.saved[placeholder]
        forward_outputs = [node for name, node in outputs.items() if name[0] != "gradient"]
        forward.graph.output((*forward_outputs, *dict.fromkeys(backward.saved.values())))
        drop_unused(forward.graph)
        propagate_layers(forward.graph)
        for placeholder, saved in backward.saved.items():
            if "layer" in saved.meta:
                placeholder.meta["layer"] = saved.meta["layer"]
        left = {*forward.graph.nodes, *backward.graph.nodes}
        for stands_for, calls in self._local_calls:
            first = next((call for call in calls if call in left), None)
            # The first call has the cost of all.
            if first is not None:
                first.meta["stands_for"] = stands_for
        parameters = {source.name for source in self.flow.graph.inputs if source.kind == "parameter"}
        places = [place for place, (_, name) in enumerate(names) if name in parameters]
        unreduced = None if reduced is None else take_reductions(backward.graph, places, reduced)
        bucket_reductions(backward.graph)
        for half in (forward, backward):
            schedule(half.graph)
            if not compiled:
                schedule_copies(half.graph)
        output: Any = backward.graph.output_node()
        outputs.update(zip(names, output.args[0], strict=True))
        return unreduced
