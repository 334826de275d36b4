"""An exported forward graph, read for the choice of stages: seconds, bytes, and what cannot be parted."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from autoshard.capture.layers import group_by_list_element
from autoshard.cluster.cost import CostModel
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.recomputable import recompute_seconds
from autoshard.program.dry_run import CallCost, DryRun
from autoshard.program.kernels import tensors


@dataclass(frozen=True, slots=True)
class TensorAtRest:
    """A parameter or buffer; `trained` is whether it has a gradient."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    bytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class GraphCall:
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
    layer: str


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """The calls of a graph in its order, the tensors that it keeps, and pairs of calls that cannot be parted."""

    calls: tuple[GraphCall, ...]
    at_rest: tuple[TensorAtRest, ...]
    together: tuple[tuple[int, int], ...]


def read_forward_graph(exported: ExportedModule, cost: CostModel) -> ForwardGraph:
    """Read an exported module; tied parameters share a placeholder there."""
    return _Reader(exported, cost).read()


class _Reader:
    """One pass over a graph."""

    def __init__(self, exported: ExportedModule, cost: CostModel) -> None:
        self.exported = exported
        self.graph = exported.graph
        self.cost = cost
        sources = exported.sources
        self.names = {node: one.name for node, one in sources.items() if one.kind in ("parameter", "buffer")}
        self.parameters = {node for node, one in sources.items() if one.kind == "parameter"}
        self.needs = {node: node in self.parameters and one.fake.requires_grad for node, one in sources.items()}
        self.nodes = [node for node in self.graph.nodes if node.op == "call_function"]
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.costs: dict[fx.Node, CallCost] = {}
        self.memory: dict[fx.Node, tuple[fx.Node, int]] = {}  # the node, and its result, in whose memory a tensor lies

    def read(self) -> ForwardGraph:
        """The graph."""
        run = DryRun(self.cost)
        for node in self.graph.nodes:
            self.memory[node] = node, 0
            if node in self.position:
                self._price_node(node, run)
        saved = self._saved_bytes()
        again = recompute_seconds(self.nodes, self._forward_seconds(), self._fixed_nodes())
        layers = self._layers()
        calls = []
        for node in self.nodes:
            call, value = self.costs[node], node.meta.get("val")
            size = _bytes(value)
            readers = [user for user in node.users if user in self.position]
            differentiated = sum(self.needs[user] for user in readers) if self.needs[node] else 0
            calls.append(
                GraphCall(
                    name=node.name,
                    forward_seconds=call.forward_seconds,
                    backward_seconds=call.backward_seconds + self._additions(value, differentiated - 1),
                    saved_bytes=saved.get(node, 0) + call.saved_inside,
                    at_rest=tuple(dict.fromkeys(self._read_at_rest(node))),
                    users=tuple(sorted(self.position[user] for user in readers)),
                    bytes=size,
                    gradient_bytes=size if self.needs[node] else 0,
                    recompute_seconds=again.get(node),
                    output=node in self.exported.forward.outputs,
                    layer=layers.get(node, ""),
                )
            )
        return ForwardGraph(tuple(calls), self._at_rest(), tuple(self._inseparable_pairs()))

    def _layers(self) -> dict[fx.Node, str]:
        """The layer that a node belongs to, where it belongs to one."""
        stacks = {node: node.meta.get("nn_module_stack") or {"": ("",)} for node in self.nodes}
        found = group_by_list_element({node: next(reversed(stack.values()))[0] for node, stack in stacks.items()})
        return {node: name for name, nodes in found.items() for node in nodes}

    def _forward_seconds(self) -> dict[fx.Node, float]:
        return {node: cost.forward_seconds for node, cost in self.costs.items()}

    def _fixed_nodes(self) -> set[fx.Node]:
        """What can't be had on another stage: parameters, what has a gradient, and what is changed in place."""
        differentiated = {node for node, needs in self.needs.items() if needs}
        changed = {name for group in self.exported.together for name in group}
        return self.parameters | differentiated | {node for node in self.nodes if node.name in changed}

    def _inseparable_pairs(self) -> Iterator[tuple[int, int]]:
        """Pairs of positions that one stage must have, the earlier first.

        A result that is no tensor goes with its readers. What nothing reads goes with the call that it watches, or, if
        it reads no call, such as a count of batches, with the call behind it. Changes in place as the export says.
        """
        last = len(self.nodes) - 1
        for node, place in self.position.items():
            if not isinstance(node.meta.get("val"), torch.Tensor):
                yield from ((place, self.position[user]) for user in node.users if user in self.position)
            if not node.users:
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

    def _saved_bytes(self) -> dict[fx.Node, int]:
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
            if source in self.names:
                yield self.names[source]

    def _at_rest(self) -> tuple[TensorAtRest, ...]:
        found = {}
        for node, name in self.names.items():
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                shape, size = tuple(value.shape), value.element_size()
                found[name] = TensorAtRest(name, shape, size, _bytes(value), self.needs[node])
        return tuple(found.values())


def _result(source: fx.Node, index: int) -> int:
    """Number of a result among those that are tensors."""
    value = source.meta.get("val")
    return len(list(tensors(list(value[:index])))) if isinstance(value, (list, tuple)) else index


def _bytes(value: object) -> int:
    return sum(one.numel() * one.element_size() for one in tensors(value))
