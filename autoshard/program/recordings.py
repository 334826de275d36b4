"""Local programs of operators and reshards, each recorded once for all places that run the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture.fake_module import DEVICE
from autoshard.capture.joint import JointGraph
from autoshard.patterns.local import LocalCall
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.strategy import Choices
from autoshard.program.graph_emitter import GraphEmitter
from autoshard.program.walk import LocalResults, emit_operator
from autoshard.reshard.lower import lower
from autoshard.reshard.path import Path
from autoshard.size import plain
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A local program, to be added to a graph as often as it is needed.

    Attributes:
        inputs: its operands, the rank's coordinates and the seed.
        calls: the calls, in order.
        local: the nodes that it leaves; of a reshard, one result.
    """

    inputs: tuple[fx.Node, ...]
    calls: tuple[fx.Node, ...]
    local: LocalResults

    def play(self, given: Sequence[fx.Node], call: Callable[..., fx.Node]) -> dict[fx.Node, fx.Node]:
        """Add the program to a graph, and return the node of every node of the recording.

        Args:
            given: the inputs.
            call: adds a call, given its operator, arguments, keyword arguments and fake tensor.
        """
        nodes = dict(zip(self.inputs, given, strict=True))
        for node in self.calls:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
            nodes[node] = call(node.target, args, kwargs, node.meta["val"])
        return nodes


class _Recorder(GraphEmitter):
    """An emitter whose graph is the local program of one operator or reshard.

    Groups are called after their axes. A coordinate is one input, wherever it is read.
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

    def recording(self, local: LocalResults) -> Recording:
        """Return the program."""
        return Recording(tuple(self.inputs), tuple(self.graph.nodes)[len(self.inputs) :], local)


class LocalPrograms:
    """Recordings by what they depend on: the call, the strategy, the shapes and strides of operands.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
    """

    def __init__(self, graph: JointGraph, mesh: MeshShape) -> None:
        example = next(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
        self.mesh = mesh
        self.mode = example.fake_mode
        self.results: dict[Hashable, Any] = {}  # fake tensors of calls, which all recordings share
        self._operators: dict[Hashable, Recording] = {}
        # A tensor's identity is a cheaper key than its shape and strides.
        self._by_identity: dict[Hashable, Recording] = {}
        self._empty: dict[Hashable, torch.Tensor] = {}
        self._reshards: dict[Hashable, Recording] = {}
        self._keep_alive: list[object] = []  # the objects that keys name by identity

    def operator(
        self, call: OpCall, rule: Rule, choices: Choices, operands: Sequence[torch.Tensor], zeros: Sequence[bool]
    ) -> Recording:
        """Return the local program of an operator on operands that look like these."""
        identity = (id(call), id(rule), choices, tuple(zeros), tuple(map(id, operands)))
        if identity not in self._by_identity:
            key = (*identity[:-1], tuple(map(_layout, operands)))
            if key not in self._operators:
                recorder = _Recorder(self, operands)
                local = LocalCall(call, rule, choices, self.mesh, recorder, recorder.operands, zeros)
                self._operators[key] = recorder.recording(emit_operator(local))
            self._keep_alive += [call, rule, *operands]
            self._by_identity[identity] = self._operators[key]
        return self._by_identity[identity]

    def reshard(self, path: Path, value: torch.Tensor) -> Recording:
        """Return the steps of a path on a local tensor that looks like this one."""
        key = (id(path), _layout(value))
        if key not in self._reshards:
            self._keep_alive.append(path)
            recorder = _Recorder(self, [value])
            result = lower(path, recorder.operands[0], recorder, value.dtype)
            self._reshards[key] = recorder.recording(LocalResults((), (), (result,), ()))
        return self._reshards[key]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the row-major fake tensor of a shape, one for all places, so that calls on it have equal keys."""
        key = (tuple(int(plain(size)) for size in shape), dtype)
        if key not in self._empty:
            with self.mode:
                self._empty[key] = torch.empty(key[0], dtype=dtype, device=DEVICE)
        return self._empty[key]


def _layout(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
