"""A smaller problem in place of a whole one, and the map back, as in cvxpy's chain of reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from autoshard.solver.problem import Array, Edge, IntArray, Problem


@dataclass(frozen=True, slots=True, eq=False)
class ReducedProblem:
    """A problem whose nodes represent one or more nodes of a whole problem, with all or some of their strategies.

    Attributes:
        whole: the whole problem.
        problem: the smaller problem; the whole one if nothing was reduced.
        order: per node of the smaller problem, its time in the program; equal ones by their number.
        lost: lower bound of the cost of assignments that the smaller problem lacks: `inf` if it lacks none, `-inf` if
            nothing is known.
        follows: per node of the whole problem, the node that represents it; None if each has its own.
        kept: per node of the whole problem, its strategies in the smaller one, ascending; None for all.
    """

    whole: Problem
    problem: Problem
    order: Sequence[float]
    lost: float = inf
    follows: Sequence[int] | None = None
    kept: Sequence[IntArray] | None = None

    @classmethod
    def of(cls, problem: Problem, order: Sequence[float]) -> ReducedProblem:
        """Return the problem itself, not reduced."""
        return cls(problem, problem, order)

    def restrict(self, kept: Sequence[IntArray], lost: float = -inf) -> ReducedProblem:
        """Return the problem with only some strategies of every node.

        Args:
            kept: per node its strategies, ascending.
            lost: lower bound of the cost of assignments with other strategies.
        """
        assert self.follows is None, "strategies are dropped before nodes are tied: tied tables are seldom shared"
        return replace(self, problem=_restrict(self.problem, kept), lost=min(lost, self.lost), kept=kept)

    def solution(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Map an assignment to the whole problem; an empty one stays empty."""
        if not assignment:
            return ()
        places = tuple(assignment) if self.follows is None else tuple(assignment[node] for node in self.follows)
        if self.kept is None:
            return places
        return tuple(int(strategies[place]) for strategies, place in zip(self.kept, places, strict=True))

    def bound(self, value: float) -> float:
        """Return a bound of the whole problem, given one of the smaller."""
        return min(value, self.lost)

    def contract(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Map an assignment of the whole problem, with equal choices of tied nodes, to the smaller problem."""
        assert self.kept is None
        if self.follows is None:
            return tuple(assignment)
        chosen = dict(zip(self.follows, assignment, strict=True))
        return tuple(chosen[node] for node in range(self.problem.size))


def _restrict(problem: Problem, kept: Sequence[IntArray]) -> Problem:
    # Shared objects stay shared, so that work is done once per object.
    names = [strategies.tobytes() for strategies in kept]
    vectors: dict[tuple[int, bytes], Array] = {}
    tables: dict[tuple[int, bytes, bytes], Array] = {}
    costs = []
    for vector, name, strategies in zip(problem.costs, names, kept, strict=True):
        if (id(vector), name) not in vectors:
            vectors[id(vector), name] = vector[strategies]
        costs.append(vectors[id(vector), name])
    edges = []
    for edge in problem.edges:
        key = id(edge.costs), names[edge.source], names[edge.target]
        if key not in tables:
            tables[key] = edge.costs[np.ix_(kept[edge.source], kept[edge.target])]
        edges.append(Edge(edge.source, edge.target, tables[key]))
    return Problem(tuple(costs), tuple(edges))


def restrict_messages(
    problem: Problem, along: Sequence[Array], against: Sequence[Array], kept: Sequence[IntArray]
) -> tuple[list[Array], list[Array]]:
    """Return the messages along and against every edge, restricted to some strategies of every node."""
    return (
        [message[kept[edge.target]] for message, edge in zip(along, problem.edges, strict=True)],
        [message[kept[edge.source]] for message, edge in zip(against, problem.edges, strict=True)],
    )


def untie_messages(
    whole: Problem, follows: Sequence[int], along: Sequence[Array], against: Sequence[Array]
) -> tuple[list[Array | None], list[Array | None]]:
    """Return messages of tied nodes as messages of the whole problem, in equal parts for the edges of a pair."""
    ends = [(follows[edge.source], follows[edge.target]) for edge in whole.edges]
    counts = Counter(ends)
    # A tied problem has edges in the order of first occurrence, and none between nodes that are tied to each other.
    between = [end for end in counts if end[0] != end[1]]
    along_of = {end: message / counts[end] for end, message in zip(between, along, strict=True)}
    against_of = {end: message / counts[end] for end, message in zip(between, against, strict=True)}
    return [along_of.get(end) for end in ends], [against_of.get(end) for end in ends]
