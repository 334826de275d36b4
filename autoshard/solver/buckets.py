"""Buckets of an elimination: the terms summed when a node is eliminated, and the buckets whose minima are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autoshard.solver.problem import Array, IntArray

T = TypeVar("T")
Entries = TypeVar("Entries", Array, IntArray)
Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket(Generic[T]):
    """The terms of the sum when a node is eliminated.

    Attributes:
        scope: of the sum: the nodes that its minimum depends on, and last the eliminated node.
        terms: the terms in the sum.
        children: positions of the buckets whose minima are in the sum.
    """

    scope: Scope
    terms: tuple[T, ...]
    children: tuple[int, ...]

    @property
    def node(self) -> int:
        """The eliminated node."""
        return self.scope[-1]

    @property
    def rest(self) -> Scope:
        """The nodes that the minimum depends on; empty where a component ends."""
        return self.scope[:-1]


def buckets(order: Sequence[int], terms: Sequence[T], scope_of: Callable[[T], Scope]) -> list[Bucket[T]]:
    """Return the buckets of nodes that are eliminated in this order; terms of an empty scope are in none."""
    place = {node: number for number, node in enumerate(order)}
    by_node: list[list[T]] = [[] for _ in order]
    for term in terms:
        if scope_of(term):
            by_node[min(place[node] for node in scope_of(term))].append(term)
    children: list[list[int]] = [[] for _ in order]
    result: list[Bucket[T]] = []
    for number, node in enumerate(order):
        members = {member for term in by_node[number] for member in scope_of(term)}
        members.update(member for child in children[number] for member in result[child].rest)
        # The eliminated node is last, so that the minimum over it is over the last axis of strategies.
        scope = sorted({node, *members}, key=place.__getitem__, reverse=True)
        result.append(Bucket(tuple(scope), tuple(by_node[number]), tuple(children[number])))
        if len(scope) > 1:
            # The minimum is added where the next of its nodes is eliminated: the buckets form a tree.
            children[place[scope[-2]]].append(number)
    return result


def spread(table: Entries, scope: Scope, joint: Scope) -> Entries:
    """Reshape a table over `scope` to broadcast over `joint`, which contains it in the same order; other axes last."""
    sizes = dict(zip(scope, table.shape, strict=False))
    return table.reshape([sizes.get(node, 1) for node in joint] + list(table.shape[len(scope) :]))
