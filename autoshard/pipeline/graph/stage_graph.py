"""`StageGraph`: what the choice of pipeline stages needs to know of a forward graph, as numbers."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.cluster.cost import CostModel
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.pipeline.graph.components import components
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.forward_graph import ForwardGraph, read_forward_graph


@dataclass(frozen=True, slots=True)
class StageNode:
    """Operators that run on one stage together.

    Attributes:
        name: of the operator among them that takes longest.
        forward_seconds, backward_seconds: per microbatch, on a device of speed 1.
        saved_bytes: per microbatch, what they make and backward reads.
        at_rest: names of the parameters and buffers that they read.
        members: names of the graph's nodes, in its order.
        layer: path of the layer that all of them belong to, or `""`.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    at_rest: tuple[str, ...]
    members: tuple[str, ...]
    layer: str = ""

    @property
    def seconds(self) -> float:
        """Forward and backward, per microbatch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class StageValue:
    """A tensor that one node makes and others read.

    Attributes:
        name: of the graph's node that makes it.
        source: the node, by position.
        users: the nodes that read it, by position, in order.
        bytes: that cross a boundary of stages with it, per microbatch.
        gradient_bytes: that come back, 0 where it has no gradient.
        recompute_seconds: of making it once more from inputs, buffers and constants alone; None where that is not
            possible: it depends on parameters or on random numbers, or is changed in place.
        output: whether the model returns it: it is then handed on to the last stage.
    """

    name: str
    source: int
    users: tuple[int, ...]
    bytes: int
    gradient_bytes: int = 0
    recompute_seconds: float | None = None
    output: bool = False

    @property
    def traffic(self) -> int:
        """Bytes over a boundary, there and back."""
        return self.bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A forward graph for the choice of stages.

    Attributes:
        nodes: in topological order.
        values: what nodes read of each other; inputs, parameters and constants are on every stage that reads them.
        at_rest: bytes of every parameter with its gradient and optimizer state, and of every buffer.
        seconds: of all nodes.
    """

    nodes: tuple[StageNode, ...]
    values: tuple[StageValue, ...]
    at_rest: Mapping[str, int]
    seconds: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", sum(node.seconds for node in self.nodes))
        for value in self.values:
            if any(user <= value.source for user in value.users):
                raise ValueError(
                    f"value {value.name} of node {value.source} has users {value.users}: nodes must be in topological "
                    "order, every user behind the source."
                )

    @staticmethod
    def of(exported: ExportedModule, cost: CostModel, *, optimizer: OptimizerMemory | None = None) -> StageGraph:
        """The stage graph of an exported module.

        Args:
            exported: the module, exported with an example of one microbatch.
            cost: prices of one device.
            optimizer: what is kept for every trained parameter; AdamW's by default.

        Returns:
            One node for every operator, or for operators that cannot be parted: `exported.together`; several results
            and what takes them out; what has no result and the operator that it watches. Seconds forward, backward and
            saved bytes are those of `simulate.dry_run`, plus the additions of gradients where several operators read
            one value. A saved tensor is counted once, where it was made, however many operators read it and whatever
            views of it they read.
        """
        return _build_stage_graph(
            read_forward_graph(exported, cost), optimizer or optimizer_memory(None, None, foreach=False)
        )

    def merge_pairs(self, pairs: Sequence[tuple[int, int]]) -> StageGraph:
        """The graph with the nodes of every pair, by position, in one node.

        Two that are not parted are like two edges there and back: what lies on a cycle of edges is on one stage.
        """
        edges = [(value.source, user) for value in self.values for user in value.users]
        both = [*pairs, *((later, earlier) for earlier, later in pairs)]
        return self.merge_groups(components(len(self.nodes), [*edges, *both]))

    def merge_groups(self, group: Sequence[int]) -> StageGraph:
        """The graph with one node for every group of nodes.

        Args:
            group: number of the group of every node; the groups must not form a cycle.
        """
        order = _order_groups(group, [(value.source, user) for value in self.values for user in value.users])
        place = {number: position for position, number in enumerate(order)}
        members: list[list[StageNode]] = [[] for _ in order]
        for node, number in zip(self.nodes, group, strict=True):
            members[place[number]].append(node)
        values = []
        for value in self.values:
            source = place[group[value.source]]
            users = tuple(sorted({place[group[user]] for user in value.users} - {source}))
            if users or value.output:
                values.append(replace(value, source=source, users=users))
        return StageGraph(tuple(_merge_nodes(nodes) for nodes in members), tuple(values), self.at_rest)


def _merge_nodes(nodes: Sequence[StageNode]) -> StageNode:
    if len(nodes) == 1:
        return nodes[0]
    return StageNode(
        name=max(nodes, key=lambda node: node.seconds).name,
        forward_seconds=sum(node.forward_seconds for node in nodes),
        backward_seconds=sum(node.backward_seconds for node in nodes),
        saved_bytes=sum(node.saved_bytes for node in nodes),
        at_rest=tuple(dict.fromkeys(name for node in nodes for name in node.at_rest)),
        members=tuple(name for node in nodes for name in node.members),
        layer=nodes[0].layer if len({node.layer for node in nodes}) == 1 else "",
    )


def _order_groups(group: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The groups in topological order, as near to the order of the nodes as that allows."""
    first: dict[int, int] = {}
    for position, number in enumerate(group):
        first.setdefault(number, position)
    after: dict[int, set[int]] = {number: set() for number in first}
    for source, user in edges:
        if group[source] != group[user]:
            after[group[source]].add(group[user])
    waiting = dict.fromkeys(first, 0)
    for users in after.values():
        for number in users:
            waiting[number] += 1
    ready = [(first[number], number) for number, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(number)
        for user in after[number]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (first[user], user))
    assert len(order) == len(first), "groups of nodes form a cycle"
    return order


def _build_stage_graph(graph: ForwardGraph, optimizer: OptimizerMemory) -> StageGraph:
    """The graph as read, with what cannot be parted in one node each."""
    at_rest = {}
    for tensor in graph.at_rest:
        held = tensor.bytes
        if tensor.trained:
            held += tensor.bytes + optimizer.state_bytes(tensor.shape, tensor.shape, tensor.itemsize)
        at_rest[tensor.name] = held
    nodes = tuple(
        StageNode(
            call.name,
            call.forward_seconds,
            call.backward_seconds,
            call.saved_bytes,
            call.at_rest,
            (call.name,),
            call.layer,
        )
        for call in graph.calls
    )
    values = tuple(
        StageValue(
            call.name, position, call.users, call.bytes, call.gradient_bytes, call.recompute_seconds, call.output
        )
        for position, call in enumerate(graph.calls)
        if call.users or call.output
    )
    return StageGraph(nodes, values, at_rest).merge_pairs(graph.together)
