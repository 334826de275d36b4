"""The three levels in turn: cones merged into their roots, segments, and the merge of segments (Rhino 4.3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.solver.hierarchy.backbone import backbone, interleaved_order
from autoshard.solver.hierarchy.segment_merge import merge_segments
from autoshard.solver.network import Network
from autoshard.solver.problem import Edge, Problem, SolverError
from autoshard.solver.reduce import reduce
from autoshard.solver.tables import Tables
from autoshard.solver.trws import Messages

_WIDTH = 32
"""Survivors at a pivot: two to three times as many as the joint graphs of common models need for their optimum."""

_ITERATIONS = 60
"""Most passes of messages, which give the expected costs of undecided edges."""


@dataclass(frozen=True, slots=True)
class HierarchySolution:
    """The result of `solve_in_segments`.

    Attributes:
        assignment: a strategy per node; empty if none was found.
        cost: of the assignment; `inf` without one.
        lower_bound: no assignment costs less, with or without a memory limit; `inf` if none is finite.
        cones: remaining nodes after cones are merged into their roots.
        critical: computationally intensive nodes on the backbone of the whole problem.
        segments: between the remaining ones of these, and before the first and after the last.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    cones: int
    critical: int
    segments: int


def solve_in_segments(
    problem: Problem, order: Sequence[float], *, width: int = _WIDTH, deadline: float = float("inf")
) -> HierarchySolution:
    """Return a good assignment, from three levels of merging.

    *Cones.* A node with one input and one user has two neighbours. Merged into its user by dynamic programming, it
    leaves a table to its input. Cones without shared nodes are trees, and their merging is exact; the exact reductions
    do this and more (they drop forbidden and dominated strategies too). A node with several users inside a cone stays,
    as a root of its own.

    *Segments.* Critical nodes (`backbone`) are the pivots that cut the rest into segments, in an order that interleaves
    both halves of a training step (`interleaved_order`).

    *Merging.* Segment after segment is merged into one node, whose strategies are the best assignments so far for every
    strategy of the pivot (`merge_segments`). In the paper's chain, only pivots connect segments. In a joint graph,
    other tensors cross a cut as well, so survivors are carried over instead of strategies. Undecided edges count with
    the costs that the messages of a relaxation (TRW-S) expect.

    The result is exact if the survivors are as many as the assignments of a cut, otherwise near, with no guarantee but
    the bound.

    Args:
        problem: the problem.
        order: per node, its time; equal ones by their number.
        width: survivors of a segment.
        deadline: `time.monotonic()` seconds after which messages are no longer improved.

    Raises:
        SolverError: the assignment exceeds the problem's memory limit, which plays no part in the search.

    Source: Rhino 4.3, optimisation level 2 (7.5).
    """
    # On the whole problem: reductions remove most nodes of a layer, and a path through the rest says little.
    critical = set(backbone(problem, order).critical)
    network = reduce(Network.of(problem, Tables()))
    sequence = [int(node) for node in interleaved_order(problem, order) if node in network.vectors]
    pivots = {place for place, node in enumerate(sequence) if node in critical}
    choices: dict[int, int] | None = None
    bound = float("inf")
    if network.feasible:
        choices, bound = _solve_segments(network, sequence, pivots, width, deadline)
    assignment = () if choices is None else tuple(choices[node] for node in range(problem.size))
    cost = float("inf") if choices is None else problem.cost(assignment)
    if choices is not None and not problem.within_limit(problem.peak(assignment)):
        raise SolverError(
            f"the memory limit of {problem.limit:.6g} binds: what was found peaks at {problem.peak(assignment):.6g}. "
            'Segments know no memory; solve the problem with method="auto" or "ilp"'
        )
    return HierarchySolution(assignment, cost, min(bound, cost), len(sequence), len(critical), len(pivots) + 1)


def _solve_segments(
    network: Network, sequence: list[int], pivots: set[int], width: int, deadline: float
) -> tuple[dict[int, int] | None, float]:
    """Return strategies of all nodes, None if there are none, and a bound."""
    core = _ordered_problem(network, sequence)
    messages = Messages(core, range(core.size))
    relaxed = messages.run(_ITERATIONS, deadline=deadline)
    # The message to the source of an edge is the least future cost of each of its strategies, as far as the relaxation
    # knows.
    places = merge_segments(core, messages.against, pivots, width)
    if len(places) < core.size:
        return None, relaxed.bound + network.offset
    chosen = {node: int(network.labels[node][place]) for node, place in zip(sequence, places, strict=True)}
    return network.expand(chosen), relaxed.bound + network.offset


def _ordered_problem(network: Network, sequence: list[int]) -> Problem:
    """Return the rest of a network as a problem, nodes in a given order, edges from the earlier to the later node."""
    place = {node: number for number, node in enumerate(sequence)}
    edges = (
        Edge(place[node], place[neighbour], table)
        for node in sequence
        for neighbour, table in network.edges[node].items()
        if place[node] < place[neighbour]
    )
    return Problem(tuple(network.vectors[node] for node in sequence), tuple(edges))
