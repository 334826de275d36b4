"""Fewer nodes for the choice of stages: operators that may as well run on one stage become one node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from autoshard.pipeline.graph.stage_graph import StageGraph

_BRANCHES = 8
"""Nodes in branches that are looked at together: every part of them is."""


def coarsen(graph: StageGraph, grain: float) -> StageGraph:
    """Merge nodes with neighbours, as long as no assignment crosses fewer bytes for parting them.

    Three merges are made, over and over. A node goes with the only node that reads it, if what it reads is no more than
    what it makes; read values do not count that cross as far anyhow, because the reader, or what depends on the reader,
    reads them too, or the model returns them. A node goes with the only node that it reads from, if it is the only
    reader and makes no more than it reads. And branches that come together again go with the node where they do, if
    that is so of every part of them that could be left behind. So views go with their producers or readers, rotations
    of queries and keys become one node, and a norm, its projections, and the branches of a residual join with it; equal
    blocks are parted between each other.

    Args:
        graph: a stage graph.
        grain: as a share of all seconds, and of all bytes at rest and of all bytes saved: no merged node has more.

    Returns:
        A graph with fewer nodes. Nothing is lost in bytes: take an assignment that parts a merged pair, and move the
        first to the stage of the second (or the second to that of the first): what crosses any boundary less is at
        least what crosses it more, and the order of stages along edges still holds, since nothing else reads the one
        (or is read by the other). What is lost in balance and memory is at most a grain on either side of a boundary.
        Values that can be recomputed count with their bytes, though recomputing them may be cheaper: what is lost there
        are the seconds of recomputing.
    """
    merging = _Merging(graph, grain)
    merging.run()
    return graph.merge_groups([merging.group_of(node) for node in range(len(graph.nodes))])


class _Merging:
    """Groups of nodes that grow.

    Attributes:
        made: for every group, the values that others read of it, or the model returns.
        read: for every group, the values that it reads of others.
        users: for every value, the groups other than its own that read it.
        below: for every group, the nodes that depend on one of its own, as bits; these included.
    """

    def __init__(self, graph: StageGraph, grain: float) -> None:
        self.graph = graph
        count = len(graph.nodes)
        self.parent = list(range(count))
        self.size = [self._sizes(node) for node in range(count)]
        self.largest = [grain * total for total in self._totals()]
        self.at_rest = [set(node.at_rest) for node in graph.nodes]
        self.made: list[set[int]] = [set() for _ in range(count)]
        self.read: list[set[int]] = [set() for _ in range(count)]
        self.users: list[set[int]] = []
        for place, value in enumerate(graph.values):
            self.made[value.source].add(place)
            self.users.append(set(value.users))
            for user in value.users:
                self.read[user].add(place)
        self.own = [1 << node for node in range(count)]
        self.below = self._below()

    def _sizes(self, node: int) -> list[float]:
        one = self.graph.nodes[node]
        return [one.seconds, one.saved_bytes]

    def _totals(self) -> list[float]:
        nodes = self.graph.nodes
        return [self.graph.seconds, sum(node.saved_bytes for node in nodes), sum(self.graph.at_rest.values())]

    def _below(self) -> list[int]:
        below = list(self.own)
        for value in sorted(self.graph.values, key=lambda value: value.source, reverse=True):
            for user in value.users:
                below[value.source] |= below[user]
        return below

    def group_of(self, node: int) -> int:
        """Number of the group that a node is in."""
        while self.parent[node] != node:
            self.parent[node] = node = self.parent[self.parent[node]]
        return node

    def run(self) -> None:
        """Merge until nothing is left to merge."""
        waiting = deque(range(len(self.parent)))
        queued = set(waiting)
        while waiting:
            group = waiting.popleft()
            queued.discard(group)
            if self.parent[group] != group:
                continue
            near: set[int] = set()
            for moved, other in self._merges(group):
                near |= self._merge(moved, other)
            for one in near - queued:
                if self.parent[one] == one:
                    queued.add(one)
                    waiting.append(one)

    def _merges(self, group: int) -> list[tuple[int, int]]:
        """What may as well be together near a group: pairs of one that moves and one that it moves to."""
        reader, producer = self._reader(group), self._producer(group)
        if reader is not None and self._fits([group], reader) and self._can_move_later([group], [], reader):
            return [(group, reader)]
        if producer is not None and self._fits([group], producer) and self._can_move_earlier(group):
            return [(group, producer)]
        branches, join = self._branches(group)
        if not branches or not self._fits(branches, join):
            return []
        if all(self._can_move_later(part, branches, join) for part in self._closed_subsets(branches)):
            return [(branch, join) for branch in branches]
        return []

    def _branches(self, group: int) -> tuple[list[int], int]:
        """All groups between this one and the first behind which nothing depends on it but through that; and that.

        None if there are more than a few, or if there is no such group.
        """
        found: list[int] = []
        front = self._readers([group])
        while len(front) > 1:
            first = next(one for one in front if not any(self.own[one] & self.below[other] for other in front - {one}))
            found.append(first)
            if len(found) > _BRANCHES or not self.made[first] or self._is_returned(first):
                return [], group
            front = front - {first} | self._readers([first])
        if not front or self._is_returned(group):
            return [], group
        return found, next(iter(front))

    def _closed_subsets(self, branches: list[int]) -> Iterator[list[int]]:
        """Every part of the branches that an assignment can leave behind: nothing in it depends on what is not."""
        closed: list[list[int]] = [[]]
        for branch in branches:  # in topological order
            needs = [other for other in branches if other != branch and self.own[branch] & self.below[other]]
            closed += [[*part, branch] for part in closed if all(other in part for other in needs)]
        yield from closed[1:]

    def _readers(self, groups: Iterable[int]) -> set[int]:
        return set().union(*(self.users[value] for group in groups for value in self.made[group]))

    def _is_returned(self, group: int) -> bool:
        return any(self.graph.values[value].output for value in self.made[group])

    def _reader(self, group: int) -> int | None:
        """The only group that reads this one, if the model returns none of its values."""
        readers = self._readers([group])
        return next(iter(readers)) if len(readers) == 1 and not self._is_returned(group) else None

    def _producer(self, group: int) -> int | None:
        """The only group that this one reads, if nothing else reads the same values of it."""
        producers = {self.group_of(self.graph.values[value].source) for value in self.read[group]}
        alone = all(self.users[value] == {group} and not self.graph.values[value].output for value in self.read[group])
        return next(iter(producers)) if len(producers) == 1 and alone else None

    def _can_move_later(self, part: list[int], branches: list[int], reader: int) -> bool:
        """Whether no more crosses a boundary between a part of branches and the rest if that part is behind it too."""
        inside, behind = set(part), set(branches) - set(part)
        read = set().union(*(self.read[group] for group in part))
        own = set().union(*(self.made[group] for group in part))
        carried = (value for value in read - own if not self._crosses_regardless(value, inside, behind, reader))
        return self._traffic(carried) <= self._traffic(value for value in own if self.users[value] - inside)

    def _crosses_regardless(self, value: int, part: set[int], behind: set[int], reader: int) -> bool:
        """Whether the value goes at least as far for the sake of others: what is behind, or depends on the reader."""
        others = self.users[value] - part
        returned = self.graph.values[value].output
        return returned or any(other in behind or self.own[other] & self.below[reader] for other in others)

    def _can_move_earlier(self, group: int) -> bool:
        """Whether no more crosses a boundary between a group and its only producer if the group is before it too."""
        recomputed = any(self.graph.values[value].recompute_seconds is not None for value in self.read[group])
        return not recomputed and self._traffic(self.made[group]) <= self._traffic(self.read[group])

    def _traffic(self, values: Iterable[int]) -> int:
        return sum(self.graph.values[value].traffic for value in values)

    def _fits(self, moved: list[int], other: int) -> bool:
        """Whether all together are not more than a grain, or what is moved counts for neither balance nor memory."""
        if not any(any(self.size[group]) or self.at_rest[group] for group in moved):
            return True
        groups = [*moved, other]
        sizes = [sum(amounts) for amounts in zip(*(self.size[group] for group in groups), strict=True)]
        held = sum(self.graph.at_rest[name] for name in set().union(*(self.at_rest[group] for group in groups)))
        return all(size <= most for size, most in zip([*sizes, held], self.largest, strict=True))

    def _merge(self, group: int, other: int) -> set[int]:
        """Make one group of two; returns it and its neighbours, for which more may be possible now."""
        self.parent[group] = other
        self.size[other] = [mine + theirs for mine, theirs in zip(self.size[group], self.size[other], strict=True)]
        self.at_rest[other] |= self.at_rest[group]
        self.own[other] |= self.own[group]
        self.below[other] |= self.below[group]
        for value in self.read[group]:
            self.users[value].discard(group)
            self.users[value].add(other)
        self.read[other] |= self.read[group]
        self.made[other] |= self.made[group]
        for value in self.made[other] & self.read[other]:
            self.users[value].discard(other)
            self.read[other].discard(value)
        self.made[other] = {value for value in self.made[other] if self.users[value] or self.graph.values[value].output}
        producers = {self.group_of(self.graph.values[value].source) for value in self.read[other]}
        return {other}.union(producers, *(self.users[value] for value in self.made[other]))
