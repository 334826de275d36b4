"""`StageGraph`: the seconds and bytes of a forward graph, for the assignment of its operators to stages."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class StageNode:
    """Operators that run on one stage together.

    Attributes:
        name: of its operator that takes longest.
        forward_seconds, backward_seconds: per microbatch, on a device of speed 1.
        saved_bytes: of results that backward reads, per microbatch.
        at_rest: names of the parameters and buffers that it reads.
        members: names of the graph's nodes, in its order.
        layer: path of the layer that all members belong to, or `""`.
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
        """Seconds of forward and backward, per microbatch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True)
class StageValue:
    """A tensor that one node makes and others read.

    Attributes:
        name: of its node in the exported graph.
        source: position of the node that makes it.
        users: positions of the nodes that read it, in order.
        bytes: of a microbatch's tensor.
        gradient_bytes: of its gradient, 0 where it has none.
        recompute_seconds: of computing it anew from inputs, buffers and constants alone; None where that is not
            possible: it depends on parameters or on random numbers, or is changed in place.
        output: True if the model returns it: it is then handed on to the last stage.
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
        """Bytes over a boundary, forward and back."""
        return self.bytes + self.gradient_bytes


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A forward graph for the assignment of stages.

    Attributes:
        nodes: in topological order.
        values: tensors between nodes; inputs, parameters and constants are on every stage that reads them.
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

    def merge_pairs(self, pairs: Sequence[tuple[int, int]]) -> StageGraph:
        """Return the graph with the nodes of every pair of positions merged."""
        # A pair is two edges, there and back. Stages go forward along edges, so nodes on a cycle are on one stage.
        edges = [(value.source, user) for value in self.values for user in value.users]
        both = [*pairs, *((later, earlier) for earlier, later in pairs)]
        return self.merge_groups(strongly_connected_components(len(self.nodes), [*edges, *both]))

    def merge_groups(self, group: Sequence[int]) -> StageGraph:
        """Return the graph with one node for every group of nodes.

        Args:
            group: the number of every node's group; the groups must not form a cycle.
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
    """Return the groups in topological order, ties in the order of their first nodes."""
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


def strongly_connected_components(nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of every node's component; nodes have the same one if each can be reached from the other.

    Source: Kosaraju's algorithm: depth-first, then against the edges, from the node that was left last.
    """
    after: list[list[int]] = [[] for _ in range(nodes)]
    before: list[list[int]] = [[] for _ in range(nodes)]
    for source, user in edges:
        after[source].append(user)
        before[user].append(source)
    component = [-1] * nodes
    for start in reversed(_postorder(after)):
        if component[start] >= 0:
            continue
        component[start], stack = start, [start]
        while stack:
            for node in before[stack.pop()]:
                if component[node] < 0:
                    component[node] = start
                    stack.append(node)
    return component


def _postorder(after: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes in the order in which a depth-first search leaves them."""
    seen = [False] * len(after)
    order = []
    for start in range(len(after)):
        if seen[start]:
            continue
        seen[start], stack = True, [(start, iter(after[start]))]
        while stack:  # no recursion, as graphs are deeper than Python's stack
            node, rest = stack[-1]
            following = next((user for user in rest if not seen[user]), None)
            if following is None:
                order.append(node)
                stack.pop()
            else:
                seen[following] = True
                stack.append((following, iter(after[following])))
    return order
