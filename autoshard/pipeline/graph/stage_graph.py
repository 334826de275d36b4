"""`StageGraph`: the seconds and bytes of a forward graph, for the assignment of its operators to stages.

`coarsen` merges operators between which no stage need end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter

from sympy.utilities import iterables


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
        # Values that nothing outside of its group reads are gone: they cross no boundary.
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
    # The order of the nodes is kept where edges allow it: stages as stretches of it are then stretches of the model.
    first: dict[int, int] = {}
    for position, number in enumerate(group):
        first.setdefault(number, position)
    before: dict[int, set[int]] = {number: set() for number in first}
    for source, user in edges:
        if group[source] != group[user]:
            before[group[user]].add(group[source])
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ready: list[tuple[int, int]] = []
    order = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, (first[number], number))
        _, number = heapq.heappop(ready)
        order.append(number)
        sorter.done(number)
    return order


def strongly_connected_components(nodes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of every node's component; nodes have the same one if each can be reached from the other."""
    component = [0] * nodes
    for number, members in enumerate(iterables.strongly_connected_components((range(nodes), edges))):
        for node in members:
            component[node] = number
    return component


# Most nodes in branches that are merged together, as all their closed subsets are looked at.
_BRANCHES = 8


def coarsen(graph: StageGraph, grain: float) -> StageGraph:
    """Merge nodes with neighbours, where parting them saves no bytes over any boundary.

    Three merges are repeated. (1) A node joins its only reader if it reads no more bytes than it makes. Values that
    cross as far anyway do not count, because the reader or its descendants read them too, or the model returns them.
    (2) A node joins its only source if it is the only reader and makes no more bytes than it reads. (3) Branches that
    meet again join the node where they meet, if (1) holds for every closed subset of them. So views join their
    producers or readers, rotations of queries and keys become one node, and a norm, its projections, and the branches
    of a residual join it. Boundaries are left between equal blocks.

    Args:
        graph: a stage graph.
        grain: limit of a merged node, as a share of all seconds, of all bytes at rest, and of all saved bytes.

    Returns:
        A graph with fewer nodes. No bytes are lost. Take an assignment that parts a merged pair, and move the first to
        the stage of the second (or the second to that of the first): every boundary saves at least the bytes that it
        gains, and the order of stages along edges still holds, since the first has no other readers (or the second no
        other sources). Balance and memory lose at most a grain on either side of a boundary. Values that can be
        recomputed count with their bytes, although recomputing may be cheaper: that may lose seconds of recomputation.
    """
    merging = _Merging(graph, grain)
    merging.run()
    return graph.merge_groups([merging.group_of(node) for node in range(len(graph.nodes))])


class _Merging:
    """Groups of nodes that grow.

    Attributes:
        made: for every group, its values that other groups read or the model returns.
        read: for every group, the values of other groups that it reads.
        users: for every value, the groups other than its own that read it.
        members: for every group its nodes, as bits of an integer: unions and intersections of graphs are then quick.
        below: for every group, the nodes that depend on one of its own, these included, as bits.
    """

    def __init__(self, graph: StageGraph, grain: float) -> None:
        self.graph = graph
        count = len(graph.nodes)
        self.parent = list(range(count))
        self.size = [[node.seconds, node.saved_bytes] for node in graph.nodes]
        totals = [graph.seconds, sum(node.saved_bytes for node in graph.nodes), sum(graph.at_rest.values())]
        self.largest = [grain * total for total in totals]
        self.at_rest = [set(node.at_rest) for node in graph.nodes]
        self.made: list[set[int]] = [set() for _ in range(count)]
        self.read: list[set[int]] = [set() for _ in range(count)]
        self.users: list[set[int]] = []
        for place, value in enumerate(graph.values):
            self.made[value.source].add(place)
            self.users.append(set(value.users))
            for user in value.users:
                self.read[user].add(place)
        # Descendants come later in the order, so going backwards every node finds those of its readers complete.
        self.members = [1 << node for node in range(count)]
        self.below = list(self.members)
        for value in sorted(graph.values, key=lambda value: value.source, reverse=True):
            for user in value.users:
                self.below[value.source] |= self.below[user]

    def group_of(self, node: int) -> int:
        """Return the group of a node: union-find with path halving."""
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def run(self) -> None:
        """Merge until nothing is left to merge."""
        # A merge makes others possible near it alone, so only neighbours are looked at again.
        waiting = deque(range(len(self.parent)))
        queued = set(waiting)
        while waiting:
            group = waiting.popleft()
            queued.discard(group)
            if self.parent[group] != group:
                continue
            near: set[int] = set()
            for moved, target in self._merges(group):
                near |= self._merge(moved, target)
            for neighbour in near - queued:
                if self.parent[neighbour] == neighbour:
                    queued.add(neighbour)
                    waiting.append(neighbour)

    def _merges(self, group: int) -> list[tuple[int, int]]:
        """Return the merges near a group: pairs of the group that moves and the one that it joins."""
        reader, producer = self._reader(group), self._producer(group)
        if reader is not None and self._fits([group], reader) and self._can_move_later([group], [], reader):
            return [(group, reader)]
        if producer is not None and self._fits([group], producer):
            # A value that can be recomputed may cross no boundary at all: then the move saves nothing.
            recomputed = any(self.graph.values[value].recompute_seconds is not None for value in self.read[group])
            if not recomputed and self._traffic(self.made[group]) <= self._traffic(self.read[group]):
                return [(group, producer)]
        branches, join = self._branches(group)
        if not branches or not self._fits(branches, join):
            return []
        if all(self._can_move_later(part, branches, join) for part in self._closed_subsets(branches)):
            return [(branch, join) for branch in branches]
        return []

    def _branches(self, group: int) -> tuple[list[int], int]:
        """Return the groups between this one and the first on which all its descendants depend, and that group.

        No groups if there are more than a few, or if there is no such group.
        """
        branches: list[int] = []
        front = self._readers([group])
        while len(front) > 1:
            # The first in topological order: it depends on no other one.
            first = next(
                node for node in front if not any(self.members[node] & self.below[rest] for rest in front - {node})
            )
            branches.append(first)
            if len(branches) > _BRANCHES or not self.made[first] or self._is_returned(first):
                return [], group
            front = front - {first} | self._readers([first])
        if not front or self._is_returned(group):
            return [], group
        return branches, next(iter(front))

    def _closed_subsets(self, branches: list[int]) -> Iterator[list[int]]:
        """Yield the subsets of branches that a boundary can leave before it: all that they depend on is in them."""
        closed: list[list[int]] = [[]]
        # In topological order: what a branch depends on is in the subsets before.
        for branch in branches:
            needs = [rest for rest in branches if rest != branch and self.members[branch] & self.below[rest]]
            closed += [[*part, branch] for part in closed if all(need in part for need in needs)]
        yield from closed[1:]

    def _readers(self, groups: Iterable[int]) -> set[int]:
        return set().union(*(self.users[value] for group in groups for value in self.made[group]))

    def _is_returned(self, group: int) -> bool:
        return any(self.graph.values[value].output for value in self.made[group])

    def _reader(self, group: int) -> int | None:
        """Return the only group that reads this one, if the model returns none of its values."""
        readers = self._readers([group])
        return next(iter(readers)) if len(readers) == 1 and not self._is_returned(group) else None

    def _producer(self, group: int) -> int | None:
        """Return the only group that this one reads, if nothing else reads the same values of it."""
        producers = {self.group_of(self.graph.values[value].source) for value in self.read[group]}
        alone = all(self.users[value] == {group} and not self.graph.values[value].output for value in self.read[group])
        return next(iter(producers)) if len(producers) == 1 and alone else None

    def _can_move_later(self, part: list[int], branches: list[int], reader: int) -> bool:
        """Return True if moving a part of branches behind a boundary, to the rest, crosses no more bytes there."""
        inside, behind = set(part), set(branches) - set(part)
        read = set().union(*(self.read[group] for group in part))
        made = set().union(*(self.made[group] for group in part))

        def crosses_regardless(value: int) -> bool:
            # Other readers, behind the boundary or descendants of the reader, need the value there, or the last stage.
            others = self.users[value] - inside
            returned = self.graph.values[value].output
            return returned or any(user in behind or self.members[user] & self.below[reader] for user in others)

        carried = (value for value in read - made if not crosses_regardless(value))
        return self._traffic(carried) <= self._traffic(value for value in made if self.users[value] - inside)

    def _traffic(self, values: Iterable[int]) -> int:
        return sum(self.graph.values[value].traffic for value in values)

    def _fits(self, moved: list[int], target: int) -> bool:
        """Return True if the groups together are within the grain."""
        # Views and the like count for neither balance nor memory.
        if not any(any(self.size[group]) or self.at_rest[group] for group in moved):
            return True
        groups = [*moved, target]
        sizes = [sum(amounts) for amounts in zip(*(self.size[group] for group in groups), strict=True)]
        held = sum(self.graph.at_rest[name] for name in set().union(*(self.at_rest[group] for group in groups)))
        return all(size <= most for size, most in zip([*sizes, held], self.largest, strict=True))

    def _merge(self, group: int, target: int) -> set[int]:
        """Merge a group into another; return that one and its neighbours, for which more may be possible now."""
        self.parent[group] = target
        self.size[target] = [sum(amounts) for amounts in zip(self.size[group], self.size[target], strict=True)]
        self.at_rest[target] |= self.at_rest[group]
        self.members[target] |= self.members[group]
        self.below[target] |= self.below[group]
        for value in self.read[group]:
            self.users[value].discard(group)
            self.users[value].add(target)
        self.read[target] |= self.read[group]
        self.made[target] |= self.made[group]
        # Values between the two are inside the group now.
        for value in self.made[target] & self.read[target]:
            self.users[value].discard(target)
            self.read[target].discard(value)
        values = self.graph.values
        self.made[target] = {value for value in self.made[target] if self.users[value] or values[value].output}
        producers = {self.group_of(values[value].source) for value in self.read[target]}
        return {target}.union(producers, *(self.users[value] for value in self.made[target]))
