"""`read_stage_graph`: seconds and bytes of the operators of a step, for their assignment to stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import fx

from autoshard.capture.describe import is_identity
from autoshard.capture.recomputation import group_by_list_element
from autoshard.capture.step_marks import tensor_name
from autoshard.cluster.cost import CostModel
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.pipeline.graph.microbatch_step import ForwardOperator, MicrobatchStep
from autoshard.pipeline.graph.stage_graph import StageGraph, StageNode, StageValue
from autoshard.program.aliasing import storage_root
from autoshard.program.program_replay import bytes_of, kernel_seconds


def read_stage_graph(step: MicrobatchStep, cost: CostModel, *, optimizer: OptimizerMemory | None = None) -> StageGraph:
    """Read the stage graph of a step.

    Args:
        step: captured with an example of one microbatch.
        cost: prices of one device.
        optimizer: the state of every trained parameter; AdamW's by default.

    Returns:
        One node for every operator, or for operators that must stay together: those of `step.together`, and one that
        nothing reads with the one that it reads. Seconds of the backward half are those of its nodes, additions of
        gradients with the operator that made the value. A saved tensor counts once, where it was made, however many
        operators read it or views of it.
    """
    return _CostReader(step, cost, optimizer or optimizer_memory(None, None, foreach=False)).read()


class _CostReader:
    """One pass over a step."""

    def __init__(self, step: MicrobatchStep, cost: CostModel, optimizer: OptimizerMemory) -> None:
        self.step = step
        self.cost = cost
        self.optimizer = optimizer
        sources = step.sources
        self.names = {node: item.name for node, item in sources.items() if item.kind in ("parameter", "buffer")}
        self.parameters = {node for node, item in sources.items() if item.kind == "parameter"}
        self.readers = {node: tuple(self._readers(node)) for each in step.operators for node in each.nodes}

    def read(self) -> StageGraph:
        saved = self._saved_bytes()
        additions = self._additions()
        again = self._recompute_seconds()
        layers = self._layers()
        outputs = {*self.step.outputs}
        nodes, values = [], []
        for place, each in enumerate(self.step.operators):
            nodes.append(
                StageNode(
                    name=each.name,
                    forward_seconds=self._seconds(each.nodes),
                    backward_seconds=self._seconds(each.backward) + additions.get(place, 0.0),
                    saved_bytes=saved.get(place, 0),
                    at_rest=tuple(dict.fromkeys(self._held_names(each))),
                    members=(each.name,),
                    layer=layers.get(place, ""),
                )
            )
            for node in each.nodes:
                # Its derivative may make an operator before it read the value: both are on one stage then.
                users = tuple(sorted({user for user in self.readers[node] if user > place}))
                if users or node in outputs:
                    size = bytes_of(node.meta["val"])
                    gradient = size if node in self.step.gradients else 0
                    seconds = None if gradient else again.get(place)
                    values.append(StageValue(tensor_name(node), place, users, size, gradient, seconds, node in outputs))
        graph = StageGraph(tuple(nodes), tuple(values), self._at_rest())
        return graph.merge_pairs(tuple(self._inseparable_pairs()))

    def _readers(self, node: fx.Node) -> Iterator[int]:
        for user in node.users:
            yield from self.step.owners.get(user, ())

    def _held_names(self, operator: ForwardOperator) -> Iterator[str]:
        for node in (*operator.nodes, *operator.backward):
            yield from (self.names[source] for source in node.all_input_nodes if source in self.names)

    def _seconds(self, nodes: tuple[fx.Node, ...]) -> float:
        return sum(map(self._node_seconds, nodes))

    def _node_seconds(self, node: fx.Node) -> float:
        if is_identity(node):
            return 0.0
        operands = [source.meta.get("val") for source in node.all_input_nodes]
        return kernel_seconds(self.cost, node.target, operands, node.meta.get("val"), node.args)

    def _additions(self) -> dict[int, float]:
        """Return the seconds of adding up gradients, by the operator that made the value."""
        seconds: dict[int, float] = {}
        for value, marks in self.step.gradients.items():
            place = self.step.owner(value)
            waiting = [mark.all_input_nodes[0] for mark in marks]
            while waiting and place is not None:
                node = waiting.pop()
                if node in self.step.sums:
                    seconds[place] = seconds.get(place, 0.0) + self._node_seconds(node)
                    waiting += node.all_input_nodes
        return seconds

    def _saved_bytes(self) -> dict[int, int]:
        """Return the bytes that the backward half reads of the results of every operator."""
        # A set, as a tensor counts once, however many operators save it or a view of it.
        read = {
            storage_root(source)
            for each in self.step.operators
            for node in each.backward
            for source in node.all_input_nodes
            if source.op == "call_function" and self.step.joint.phase(source) == "forward"
        }
        saved: dict[int, int] = {}
        for node in read:
            place = self.step.owner(node)  # inputs and parameters are held anyhow
            if place is not None:
                saved[place] = saved.get(place, 0) + bytes_of(node.meta["val"])
        return saved

    def _recompute_seconds(self) -> dict[int, float]:
        """Return the seconds of running an operator anew on another stage, where inputs, buffers and constants suffice.

        They include all operators that it depends on, each once.
        """
        differentiated = self.step.gradients
        cones: dict[int, frozenset[int]] = {}
        for place, each in enumerate(self.step.operators):
            # Another stage could not see a change in place, and a gradient would have to come back from there.
            if each.name in self.step.random | self.step.changing or any(node in differentiated for node in each.nodes):
                continue
            read = {source for node in each.nodes for source in node.all_input_nodes}
            owners = {owner for owner in map(self.step.owner, read) if owner is not None} - {place}
            if read.isdisjoint(self.parameters) and owners <= cones.keys():
                cones[place] = frozenset({place}).union(*(cones[owner] for owner in owners))
        forward = {place: self._seconds(self.step.operators[place].nodes) for place in cones}
        return {place: sum(forward[other] for other in cone) for place, cone in cones.items()}

    def _layers(self) -> dict[int, str]:
        """Return the path of the layer of every operator that belongs to one."""
        groups = group_by_list_element(
            {place: self.step.joint.module_path(each.nodes[0]) for place, each in enumerate(self.step.operators)}
        )
        return {place: name for name, places in groups.items() for place in places}

    def _inseparable_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield pairs of positions that one stage must have, the earlier first."""
        last = len(self.step.operators) - 1
        outputs = {*self.step.outputs}
        for place, each in enumerate(self.step.operators):
            if outputs.isdisjoint(each.nodes) and not any({*self.readers[node]} - {place} for node in each.nodes):
                # What nothing reads, such as a statistic, stays with what it reads. If it reads nothing, as a count of
                # batches does, it stays with the next operator.
                read = {self.step.owner(source) for node in each.nodes for source in node.all_input_nodes}
                watched = [owner for owner in read if owner is not None and owner != place]
                if watched:
                    yield max(watched), place
                elif last:
                    yield min(place, last - 1), min(place, last - 1) + 1
        places = {each.name: place for place, each in enumerate(self.step.operators)}
        for group in self.step.together:
            yield from pairwise(sorted(places[name] for name in group))

    def _at_rest(self) -> dict[str, int]:
        """Return the bytes of every buffer, and of every parameter with its gradient and optimizer state."""
        held = {}
        for node, name in self.names.items():
            value = node.meta["val"]
            held[name] = bytes_of(value)
            if node in self.parameters and self.step.module.get_parameter(name).requires_grad:
                shape = tuple(value.shape)
                held[name] += bytes_of(value) + self.optimizer.state_bytes(shape, shape, value.element_size())
        return held
