"""The problem at many prices of memory at once: optima, and what every choice adds to them.

At a price, time and memory are one cost, and two passes of bucket elimination find its optimum, and the optimum given
each combination of strategies that an elimination looks at. All prices share the passes: every table has one entry per
price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from autoshard.solver.problem import Array, IntArray

Scope = tuple[int, ...]

Entries = TypeVar("Entries", Array, IntArray)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Time and memory of every combination of strategies of the nodes in a scope; infinite time forbids.

    Scopes list nodes from the one that is eliminated last to the one that is eliminated first.
    """

    scope: Scope
    time: Array
    memory: Array

    def at(self, weights: Array) -> Array:
        """Time and memory weighed [*scope, prices]; what is forbidden is so at any weight."""
        allowed = np.isfinite(self.time)
        time = np.where(allowed, self.time, 0.0)
        total = time[..., None] * weights[:, 0] + self.memory[..., None] * weights[:, 1]
        return np.where(allowed[..., None], total, np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """What is summed when a node is eliminated.

    Attributes:
        scope: of the sum: the nodes that the minimum is handed on to, and at its end the node.
        costs: the costs that are summed.
        children: places of the buckets whose minima are.
    """

    scope: Scope
    costs: tuple[Costs, ...]
    children: tuple[int, ...]

    @property
    def node(self) -> int:
        """Eliminated here."""
        return self.scope[-1]

    @property
    def rest(self) -> Scope:
        """The nodes that the minimum is handed on to; none where a component ends."""
        return self.scope[:-1]


def buckets(order: Sequence[int], costs: Sequence[Costs]) -> list[Bucket]:
    """The buckets of nodes that are eliminated in this order; costs of no node are in none."""
    place = {node: number for number, node in enumerate(order)}
    own: list[list[Costs]] = [[] for _ in order]
    for one in costs:
        if one.scope:
            own[place[one.scope[-1]]].append(one)
    children: list[list[int]] = [[] for _ in order]
    found: list[Bucket] = []
    for number, node in enumerate(order):
        others = {other for one in own[number] for other in one.scope}
        others.update(other for child in children[number] for other in found[child].rest)
        scope = sorted({node, *others}, key=place.__getitem__, reverse=True)
        found.append(Bucket(tuple(scope), tuple(own[number]), tuple(children[number])))
        if len(scope) > 1:
            children[place[scope[-2]]].append(number)
    return found


def spread(table: Entries, scope: Scope, joint: Scope) -> Entries:
    """A table over `scope`, as one over a scope that holds it in the same order; further axes stay behind."""
    sizes = dict(zip(scope, table.shape, strict=False))
    return table.reshape([sizes.get(node, 1) for node in joint] + list(table.shape[len(scope) :]))


class PricedProblem:
    """A problem at several prices.

    Attributes:
        weights: of time and of memory [prices, 2].
        best: the optimum of the whole, at each price [prices].
        minima: of every bucket, over its node: of what is summed there and in all buckets below [*rest, prices].

    Args:
        sizes: strategies of every node.
        costs: of no node.
        tree: the buckets of the problem.
        weights: as above.
    """

    def __init__(self, sizes: Mapping[int, int], costs: Costs, tree: Sequence[Bucket], weights: Array) -> None:
        self.sizes = sizes
        self.tree = tree
        self.weights = weights
        self.minima: list[Array] = []
        self.best = costs.at(weights)
        for bucket in tree:
            minimum = self._sum(bucket).min(len(bucket.rest))
            self.minima.append(minimum)
            if not bucket.rest:
                self.best = self.best + minimum

    def _sum(self, bucket: Bucket) -> Array:
        total = np.zeros([self.sizes[node] for node in bucket.scope] + [len(self.weights)])
        for one in bucket.costs:
            total += spread(one.at(self.weights), one.scope, bucket.scope)
        for child in bucket.children:
            total += spread(self.minima[child], self.tree[child].rest, bucket.scope)
        return total

    def optima(self) -> dict[int, IntArray]:
        """The strategy of every node in an optimum at each price [prices]."""
        found: dict[int, IntArray] = {}
        prices = np.arange(len(self.weights))
        for bucket in reversed(self.tree):
            total = np.zeros((self.sizes[bucket.node], len(prices)))
            parts = [(one.scope, one.at(self.weights)) for one in bucket.costs]
            parts += [(self.tree[child].rest, self.minima[child]) for child in bucket.children]
            for scope, table in parts:
                at: tuple[Any, ...] = (slice(None), *(found[node] for node in scope[:-1]), prices)
                total += np.moveaxis(table, len(scope) - 1, 0)[at]
            found[bucket.node] = total.argmin(0)
        return found

    def conditional_optima(self) -> Iterator[tuple[Array, Array]]:
        """The optima of the whole at every bucket, the last one first.

        Yields:
            Those given the strategies of its scope [*scope, prices], and those given the ones of its rest, less its
            minima [*rest, prices]: what all that is not summed there or below adds at the least.
        """
        above: dict[int, Array] = {}
        for number in reversed(range(len(self.tree))):
            bucket = self.tree[number]
            minimum = self.minima[number]
            reached = np.isfinite(minimum)
            whole = above.pop(number) if bucket.rest else self.best
            with np.errstate(invalid="ignore"):
                outside = np.where(reached, whole - minimum, 0.0)  # where not, nothing is there to add to
            total = self._sum(bucket) + outside[..., None, :]
            for child in bucket.children:
                kept = set(self.tree[child].rest)
                gone = tuple(axis for axis, node in enumerate(bucket.scope) if node not in kept)
                above[child] = total.min(gone) if gone else total
            yield total, outside
