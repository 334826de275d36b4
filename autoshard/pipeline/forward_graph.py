"""An exported forward graph, read for the choice of stages: seconds, bytes, and what cannot be parted."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.capture.export import Exported
from autoshard.cluster.cost import CostModel
from autoshard.pipeline.inseparable import inseparable, last_changes
from autoshard.pipeline.recomputable import recompute_seconds
from autoshard.simulate.dry_run import CallCost, DryRun
from autoshard.simulate.kernels import tensors


@dataclass(frozen=True, slots=True)
class TensorAtRest:
    """A parameter or buffer; `trained` is whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One operator of the graph; see `StageNode` and `StageValue`. Users are calls, by position."""

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    at_rest: tuple[str, ...]
    users: tuple[int, ...]
    bytes: int
    gradient_bytes: int
    recompute_seconds: float | None
    output: bool


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """The calls of a graph in its order, the tensors that it keeps, and pairs of calls that cannot be parted."""

    calls: tuple[Call, ...]
    at_rest: tuple[TensorAtRest, ...]
    together: tuple[tuple[int, int], ...]


def read(exported: Exported, cost: CostModel) -> ForwardGraph:
    """Read a graph that `capture` exported; tied parameters share a placeholder there."""
    graph = exported.graph_module.graph
    names = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), exported.inputs, strict=True):
        names[node] = item.name if item.kind in ("parameter", "buffer") else None
    parameters = [item.name for item in exported.inputs if item.kind == "parameter"]
    fakes = {item.name: item.fake for item in exported.inputs}
    trained = {name for name in parameters if fakes[name].requires_grad}
    return _Reader(graph, names, set(parameters), trained, cost).read(exported.outputs)


def read_program(program: torch.export.ExportedProgram, cost: CostModel) -> ForwardGraph:
    """Read a program of `torch.export`; parameters that are one tensor count once, by their first name."""
    first: dict[int, str] = {}
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for name in held.values():
        if name in program.state_dict:
            first.setdefault(id(program.state_dict[name]), name)
    names: dict[fx.Node, str | None] = {}
    for node in program.graph.find_nodes(op="placeholder"):
        name = held.get(node.name)
        names[node] = name if name not in program.state_dict else first[id(program.state_dict[name])]
    parameters = {names[node] for node in names if node.name in signature.inputs_to_parameters}
    trained = {name for name in parameters if name is not None and program.state_dict[name].requires_grad}
    outputs = next(reversed(program.graph.nodes)).all_input_nodes
    return _Reader(program.graph, names, {name for name in parameters if name}, trained, cost).read(outputs)


class _Reader:
    """One pass over a graph."""

    def __init__(
        self,
        graph: fx.Graph,
        names: dict[fx.Node, str | None],
        parameters: set[str],
        trained: set[str],
        cost: CostModel,
    ) -> None:
        self.graph = graph
        self.names = names
        self.parameters = parameters
        self.trained = trained
        self.cost = cost
        self.nodes = [node for node in graph.nodes if node.op == "call_function"]
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.needs = {node: name in trained for node, name in names.items()}
        self.costs: dict[fx.Node, CallCost] = {}
        self.memory: dict[fx.Node, tuple[fx.Node, int]] = {}  # the node, and its result, in whose memory a tensor lies

    def read(self, outputs: Sequence[fx.Node]) -> ForwardGraph:
        """The graph; `outputs` are the nodes that the model returns."""
        run = DryRun(self.cost)
        for node in self.graph.nodes:
            self.memory[node] = node, 0
            if node in self.position:
                self._run(node, run)
        saved = self._saved()
        owners = {node: owner for node, (owner, _) in self.memory.items()}
        again = recompute_seconds(self.nodes, self._forward_seconds(), self._fixed(owners))
        calls = []
        for node in self.nodes:
            call, value = self.costs[node], node.meta.get("val")
            size = _bytes(value)
            readers = [user for user in node.users if user in self.position]
            differentiated = sum(self.needs[user] for user in readers) if self.needs[node] else 0
            calls.append(
                Call(
                    name=node.name,
                    forward_seconds=call.forward_seconds,
                    backward_seconds=call.backward_seconds + self._additions(value, differentiated - 1),
                    saved_bytes=saved.get(node, 0) + call.saved_inside,
                    at_rest=tuple(dict.fromkeys(self._read_at_rest(node))),
                    users=tuple(sorted(self.position[user] for user in readers)),
                    bytes=size,
                    gradient_bytes=size if self.needs[node] else 0,
                    recompute_seconds=again.get(node),
                    output=node in outputs,
                )
            )
        return ForwardGraph(tuple(calls), self._at_rest(), tuple(inseparable(self.nodes, owners)))

    def _forward_seconds(self) -> dict[fx.Node, float]:
        return {node: cost.forward_seconds for node, cost in self.costs.items()}

    def _fixed(self, owners: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """What can't be had on another stage: parameters, what has a gradient, and what is changed in place."""
        parameters = {node for node, name in self.names.items() if name in self.parameters}
        differentiated = {node for node, needs in self.needs.items() if needs}
        changed = last_changes(self.nodes, owners)
        return parameters | differentiated | {node for node, owner in owners.items() if owner in changed}

    def _run(self, node: fx.Node, run: DryRun) -> None:
        operands = node.all_input_nodes
        self.costs[node] = call = run.call(node, [self.needs.get(source, False) for source in operands])
        if node.target is operator.getitem and isinstance(node.args[1], int):
            source, index = operands[0], _result(operands[0], node.args[1])
            made = self.costs.get(source, CallCost())
            self.needs[node] = made.needs_gradient[index] if index < len(made.needs_gradient) else self.needs[source]
            alias = made.aliases[index] if index < len(made.aliases) else None
            self.memory[node] = (source, index) if alias is None else self.memory[source.all_input_nodes[alias]]
            return
        self.needs[node] = any(call.needs_gradient)
        if call.aliases and call.aliases[0] is not None:
            self.memory[node] = self.memory[operands[call.aliases[0]]]

    def _saved(self) -> dict[fx.Node, int]:
        """Bytes that backward reads of what every node makes."""
        found = set()
        for node, call in self.costs.items():
            found |= {self.memory[node.all_input_nodes[place]] for place in call.saved_operands}
            found |= {(node, place) for place in call.saved_results}
        saved: dict[fx.Node, int] = {}
        for node, place in found:
            if node in self.costs and place < len(self.costs[node].result_bytes):
                saved[node] = saved.get(node, 0) + self.costs[node].result_bytes[place]
        return saved

    def _additions(self, value: object, count: int) -> float:
        """Seconds in which the gradients of several readers are added."""
        if count <= 0 or not isinstance(value, torch.Tensor):
            return 0.0
        return count * self.cost.compute(0.0, 3 * _bytes(value), value.dtype)

    def _read_at_rest(self, node: fx.Node) -> Iterator[str]:
        for source in node.all_input_nodes:
            name = self.names.get(source)
            if name is not None:
                yield name

    def _at_rest(self) -> tuple[TensorAtRest, ...]:
        found = {}
        for node, name in self.names.items():
            value = node.meta.get("val")
            if name is not None and isinstance(value, torch.Tensor):
                shape, size = tuple(value.shape), value.element_size()
                found[name] = TensorAtRest(name, shape, size, _bytes(value), name in self.trained)
        return tuple(found.values())


def _result(source: fx.Node, index: int) -> int:
    """Number of a result among those that are tensors."""
    value = source.meta.get("val")
    return len(list(tensors(list(value[:index])))) if isinstance(value, (list, tuple)) else index


def _bytes(value: object) -> int:
    return sum(one.numel() * one.element_size() for one in tensors(value))
