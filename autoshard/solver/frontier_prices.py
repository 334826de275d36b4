"""The problem at many prices of memory at once: its optima, and the optima given every choice.

A price makes one cost of time and memory. Two passes of bucket elimination find the optimum, and the optimum given each
combination of strategies that an elimination sums. All prices share the passes: every table has one entry per price.
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

    Scopes list nodes from the last eliminated to the first.
    """

    scope: Scope
    time: Array
    memory: Array

    def at(self, weights: Array) -> Array:
        """Return time and memory weighted by the prices [*scope, prices]; a forbidden combination stays infinite."""
        # Infinite time at a price of nothing for time would be NaN, and would not forbid.
        allowed = np.isfinite(self.time)
        time = np.where(allowed, self.time, 0.0)
        total = time[..., None] * weights[:, 0] + self.memory[..., None] * weights[:, 1]
        return np.where(allowed[..., None], total, np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The terms of the sum when a node is eliminated.

    Attributes:
        scope: of the sum: the nodes that its minimum depends on, and last the eliminated node.
        costs: the costs in the sum.
        children: positions of the buckets whose minima are in the sum.
    """

    scope: Scope
    costs: tuple[Costs, ...]
    children: tuple[int, ...]

    @property
    def node(self) -> int:
        """The eliminated node."""
        return self.scope[-1]

    @property
    def rest(self) -> Scope:
        """The nodes that the minimum depends on; empty where a component ends."""
        return self.scope[:-1]


def buckets(order: Sequence[int], costs: Sequence[Costs]) -> list[Bucket]:
    """Return the buckets of nodes that are eliminated in this order; costs of an empty scope are in none."""
    place = {node: number for number, node in enumerate(order)}
    by_node: list[list[Costs]] = [[] for _ in order]
    for cost in costs:
        if cost.scope:
            by_node[place[cost.scope[-1]]].append(cost)
    children: list[list[int]] = [[] for _ in order]
    result: list[Bucket] = []
    for number, node in enumerate(order):
        members = {member for cost in by_node[number] for member in cost.scope}
        members.update(member for child in children[number] for member in result[child].rest)
        # The eliminated node is last, so that the minimum over it is over the last axis of strategies.
        scope = sorted({node, *members}, key=place.__getitem__, reverse=True)
        result.append(Bucket(tuple(scope), tuple(by_node[number]), tuple(children[number])))
        if len(scope) > 1:
            # The minimum is added where the next of its nodes is eliminated: the buckets form a tree, and each is
            # summed once.
            children[place[scope[-2]]].append(number)
    return result


def spread(table: Entries, scope: Scope, joint: Scope) -> Entries:
    """Return a table over `scope` as one over a scope that contains it in the same order; other axes stay last."""
    sizes = dict(zip(scope, table.shape, strict=False))
    return table.reshape([sizes.get(node, 1) for node in joint] + list(table.shape[len(scope) :]))


class PricedProblem:
    """A problem at several prices.

    Attributes:
        weights: of time and of memory [prices, 2].
        best: the optimum of the whole problem, at each price [prices].
        minima: per bucket, the minimum over its node of everything summed there and in all buckets below [*rest,
            prices].

    Args:
        sizes: strategies of every node.
        costs: costs of an empty scope.
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
        for cost in bucket.costs:
            total += spread(cost.at(self.weights), cost.scope, bucket.scope)
        for child in bucket.children:
            total += spread(self.minima[child], self.tree[child].rest, bucket.scope)
        return total

    def optima(self) -> dict[int, IntArray]:
        """Return the strategy of every node in an optimum at each price [prices]."""
        choices: dict[int, IntArray] = {}
        prices = np.arange(len(self.weights))
        # A bucket's rest is eliminated after it: those choices are known by now.
        for bucket in reversed(self.tree):
            total = np.zeros((self.sizes[bucket.node], len(prices)))
            parts = [(cost.scope, cost.at(self.weights)) for cost in bucket.costs]
            parts += [(self.tree[child].rest, self.minima[child]) for child in bucket.children]
            for scope, table in parts:
                at: tuple[Any, ...] = (slice(None), *(choices[node] for node in scope[:-1]), prices)
                total += np.moveaxis(table, len(scope) - 1, 0)[at]
            choices[bucket.node] = total.argmin(0)
        return choices

    def conditional_optima(self) -> Iterator[tuple[Array, Array]]:
        """Yield the optima of the whole problem given the choices at every bucket, the last bucket first.

        Yields:
            The optima given the strategies of its scope [*scope, prices], and those given the strategies of its rest,
            less its minima [*rest, prices]: the least cost of everything that is not summed there or below.
        """
        above: dict[int, Array] = {}
        for number in reversed(range(len(self.tree))):
            bucket = self.tree[number]
            minimum = self.minima[number]
            reached = np.isfinite(minimum)
            # The optimum given the rest, from the bucket above; a component depends on no other.
            optimum = above.pop(number) if bucket.rest else self.best
            with np.errstate(invalid="ignore"):
                # Inf - inf where all is forbidden.
                outside = np.where(reached, optimum - minimum, 0.0)
            # The downward pass: all in and below the bucket, plus the least of everything else, is an optimum of the
            # whole problem.
            total = self._sum(bucket) + outside[..., None, :]
            for child in bucket.children:
                child_rest = set(self.tree[child].rest)
                minimised = tuple(axis for axis, node in enumerate(bucket.scope) if node not in child_rest)
                above[child] = total.min(minimised) if minimised else total
            yield total, outside
