"""Fast search for a good assignment of a long problem: cones, critical nodes, segments (Rhino 4.3.2).

The nodes of the heavy operators, the backbone, remain after each cone is merged into its root. Critical nodes cut the
backbone into segments, which are solved separately and merged one after another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.core import Core
from autoshard.solver.presolve import REDUCE, presolve
from autoshard.solver.problem import Array, IntArray, Problem, SolverError
from autoshard.solver.solver_budget import UNLIMITED, Budget
from autoshard.solver.trws import Messages

_HEAVY = 0.5
"""Share of all work of the computationally intensive nodes: the fewest nodes that reach it."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The longest paths through a graph.

    Attributes:
        nodes: all nodes on a longest path, in order.
        critical: those among them that are computationally intensive.
    """

    nodes: tuple[int, ...]
    critical: tuple[int, ...]


def backbone(problem: Problem, order: Sequence[float]) -> Backbone:
    """Return the nodes with equal earliest and latest times, if every node takes one unit of time.

    The computationally intensive nodes are the heaviest that together have half of the total weight. The weight of a
    node is the cost of its cheapest strategy.

    Args:
        problem: the problem; every edge is from the earlier of its nodes to the later one.
        order: per node, its time; equal ones by their number.

    Source: Rhino 4.3.1.
    """
    rank, ends = _ranks_and_edges(problem, order)
    earliest = np.zeros(problem.size, dtype=np.int64)
    # In the order of their first nodes, whose times are then final.
    for earlier, later in ends[np.argsort(rank[ends[:, 0]], kind="stable")]:
        earliest[later] = max(earliest[later], earliest[earlier] + 1)
    remaining = np.zeros(problem.size, dtype=np.int64)
    for earlier, later in ends[np.argsort(-rank[ends[:, 1]], kind="stable")]:
        remaining[earlier] = max(remaining[earlier], remaining[later] + 1)
    # Earliest time plus the longest path to the end is the length of the longest path through a node; on the backbone
    # it equals that of the graph, so that latest and earliest time agree.
    length = int((earliest + remaining).max(initial=0))
    nodes = [int(node) for node in np.argsort(rank) if earliest[node] + remaining[node] == length]
    heavy = _heavy_nodes(problem)
    return Backbone(tuple(nodes), tuple(node for node in nodes if heavy[node]))


def _heavy_nodes(problem: Problem) -> np.ndarray:
    work = np.array([vector.min() for vector in problem.costs])
    work = np.where(np.isfinite(work) & (work > 0), work, 0.0)
    heaviest = np.argsort(-work, kind="stable")
    # The fewest that reach the share.
    needed = np.searchsorted(np.cumsum(work[heaviest]), _HEAVY * work.sum())
    heavy = np.zeros(problem.size, dtype=bool)
    heavy[heaviest[: needed + 1]] = True
    return heavy & (work > 0)


def interleaved_order(problem: Problem, order: Sequence[float]) -> IntArray:
    """Return all nodes in an order that puts a node of the backward half next to the forward nodes it depends on.

    A training step runs its layers forward, then backward, and saved tensors connect distant nodes. The step turns
    where most edges cross. A node after the turn is put after the last of its neighbours before the turn, or else next
    to the node that it follows after the turn. Only the order of a search depends on this: a graph that does not turn
    is cut worse, not wrongly.

    Args:
        problem: the problem.
        order: per node, its time; equal ones by their number.
    """
    rank, ends = _ranks_and_edges(problem, order)
    turn = _turning_point(rank[ends], problem.size)
    place = rank.astype(np.float64)
    before: list[list[int]] = [[] for _ in range(problem.size)]
    for earlier, later in ends:
        before[later].append(int(earlier))
    for node in np.argsort(rank)[turn:]:
        first_half = [place[predecessor] for predecessor in before[node] if rank[predecessor] < turn]
        second_half = [place[predecessor] for predecessor in before[node] if rank[predecessor] >= turn]
        if first_half:
            # Half a position: between that node and the next.
            place[node] = max(first_half) + 0.5
        elif second_half:
            place[node] = min(second_half)
    return np.lexsort((rank, place))


def _turning_point(ranks: IntArray, size: int) -> int:
    """Return the number of nodes before the last of the positions that most edges cross."""
    change = np.zeros(size + 1, dtype=np.int64)
    np.add.at(change, ranks[:, 0] + 1, 1)
    np.subtract.at(change, ranks[:, 1] + 1, 1)
    return size - int(np.cumsum(change)[::-1].argmax())


def _ranks_and_edges(problem: Problem, order: Sequence[float]) -> tuple[IntArray, IntArray]:
    """Return per node its place in the order, and all edges as (earlier, later) nodes."""
    rank = np.empty(problem.size, dtype=np.int64)
    rank[np.argsort(np.asarray(order, dtype=np.float64), kind="stable")] = np.arange(problem.size)
    ends = np.array([(edge.source, edge.target) for edge in problem.edges], dtype=np.int64).reshape(-1, 2)
    turned = rank[ends[:, 0]] > rank[ends[:, 1]]
    ends[turned] = ends[turned, ::-1]
    return rank, ends


_SURVIVOR_FACTOR = 4
"""Survivors inside a segment, as a multiple of those at its pivot."""


@dataclass(slots=True)
class _MergedSegments:
    """All segments so far, merged into one node whose strategies are the survivors.

    Attributes:
        costs: of each survivor, plus the expected costs of its open edges.
        open: decided nodes with edges to undecided ones.
        choices: [survivors, open nodes].
        steps: per decided node, each survivor's parent among the survivors before it, and its strategy.
    """

    costs: Array = field(default_factory=lambda: np.zeros(1))
    open: list[int] = field(default_factory=list)
    choices: IntArray = field(default_factory=lambda: np.zeros((1, 0), dtype=np.int64))
    steps: list[tuple[IntArray, IntArray]] = field(default_factory=list)


def merge_segments(problem: Problem, expected: Sequence[Array], pivots: Collection[int], width: int) -> tuple[int, ...]:
    """Return an assignment, by beam search from the first node to the last.

    A survivor is an assignment of all nodes so far. Of survivors that agree on all nodes with edges to undecided ones,
    only the cheapest is kept, which loses nothing. At a pivot the `width` cheapest are kept, and the cheapest for every
    strategy of the pivot. This is the dynamic programming along the backbone; it loses only expensive combinations of
    the other nodes across the cut. Segments are merged without loss while survivors are few.

    Args:
        problem: nodes in the order of the search, each edge from the earlier to the later node; no parallel edges. The
            memory limit is ignored.
        expected: per edge and strategy of its source, the expected cost of the edge.
        pivots: the nodes that end segments.
        width: survivors.

    Returns:
        A strategy per node; empty if every survivor became forbidden.
    """
    # Into each node: source, table, expected.
    edges: list[list[tuple[int, Array, Array]]] = [[] for _ in problem.costs]
    expected_ahead = [np.zeros(len(vector)) for vector in problem.costs]
    last = np.full(problem.size, -1)
    for edge, costs in zip(problem.edges, expected, strict=True):
        edges[edge.target].append((edge.source, edge.costs, costs))
        expected_ahead[edge.source] = expected_ahead[edge.source] + costs
        last[edge.source] = max(last[edge.source], edge.target)
    head = _MergedSegments()
    for node, vector in enumerate(problem.costs):
        costs = head.costs[:, None] + (vector + expected_ahead[node])[None, :]
        for source, table, costs_expected in edges[node]:
            # Replace the expected cost of the edge by the real one.
            costs += (table - costs_expected[:, None])[head.choices[:, head.open.index(source)]]
        _add_node(head, node, costs, last, width if node in pivots else _SURVIVOR_FACTOR * width, node in pivots)
        if not len(head.costs):
            return ()
    return _trace_back(head)


def _add_node(head: _MergedSegments, node: int, costs: Array, last: IntArray, width: int, pivot: bool) -> None:
    """Add a node to the head, given the costs [survivors, strategies] of its strategies."""
    strategies = costs.shape[1]
    open_columns = [column for column, open_node in enumerate(head.open) if last[open_node] > node]
    # Place p of the flat array is survivor p // strategies with strategy p % strategies.
    flat = costs.ravel()
    kept = np.flatnonzero(np.isfinite(flat))
    if len(open_columns) < len(head.open) or last[node] < 0:
        alike = _row_classes(head.choices[:, open_columns])
        if last[node] < 0:
            # No edge to a later node: its strategy need not be remembered.
            group = np.repeat(alike, strategies)
        else:
            group = (alike[:, None] * strategies + np.arange(strategies)).ravel()
        # If two survivors agree on all open nodes, the more expensive one can never win.
        kept = _cheapest_of(group, flat, kept)
    if len(kept) > width:
        kept = _keep_cheapest(flat, kept, width, kept % strategies if pivot else None)
    parent, choice = kept // strategies, kept % strategies
    head.costs, head.choices = flat[kept], head.choices[parent][:, open_columns]
    head.open = [head.open[column] for column in open_columns]
    head.steps.append((parent, choice))
    if last[node] >= 0:
        head.open.append(node)
        head.choices = np.column_stack((head.choices, choice))


def _row_classes(choices: IntArray) -> IntArray:
    """Return a number per row, the same for equal rows."""
    number = np.zeros(len(choices), dtype=np.int64)
    for column in choices.T:
        # Renumber after every column, since products of many columns would overflow.
        number = np.unique(number * (column.max(initial=0) + 1) + column, return_inverse=True)[1].ravel()
    return number


def _cheapest_of(group: IntArray, costs: Array, places: IntArray) -> IntArray:
    """Return the cheapest place of each group, ascending; the first of equal ones."""
    order = places[np.lexsort((costs[places], group[places]))]
    first = np.ones(len(order), dtype=bool)
    first[1:] = group[order[1:]] != group[order[:-1]]
    return np.sort(order[first])


def _keep_cheapest(costs: Array, places: IntArray, width: int, strategy: IntArray | None) -> IntArray:
    """Return the cheapest places, and the cheapest of each strategy if strategies are given, ascending."""
    kept = places[np.argsort(costs[places], kind="stable")[:width]]
    if strategy is not None:
        group = np.zeros(len(costs), dtype=np.int64)
        group[places] = strategy
        kept = np.union1d(kept, _cheapest_of(group, costs, places))
    return np.sort(kept)


def _trace_back(head: _MergedSegments) -> tuple[int, ...]:
    """Return the assignment of the cheapest survivor."""
    survivor = int(head.costs.argmin())
    choices = []
    for parent, choice in reversed(head.steps):
        choices.append(int(choice[survivor]))
        survivor = int(parent[survivor])
    return tuple(reversed(choices))


_WIDTH = 32
"""Survivors at a pivot: two to three times as many as joint graphs of common models need for the optimum."""

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
    problem: Problem, order: Sequence[float], *, width: int = _WIDTH, budget: Budget = UNLIMITED
) -> HierarchySolution:
    """Return a good assignment, from three levels of merging.

    *Cones.* A node with one input and one user has two neighbours. Merging it into its user by dynamic programming
    makes a table to its input. Cones without shared nodes are trees, and merging is exact; presolve does this and more
    (it also drops forbidden and dominated strategies). A node with several users inside a cone is kept, as a separate
    root.

    *Segments.* Critical nodes (`backbone`) are the pivots that cut the rest into segments, in an order that interleaves
    both halves of a training step (`interleaved_order`).

    *Merging.* Segment after segment is merged into one node, whose strategies are the best assignments so far for every
    strategy of the pivot (`merge_segments`). In the paper's chain, only pivots connect segments. In a joint graph,
    other tensors cross a cut, too, so survivors are carried over instead of strategies. Undecided edges count with the
    costs expected by the messages of a relaxation (TRW-S).

    The result is exact if there are as many survivors as assignments of a cut; otherwise only the bound is guaranteed.

    Args:
        problem: the problem.
        order: per node, its time; equal ones by their number.
        width: survivors of a segment.
        budget: messages are no longer improved after its end.

    Raises:
        SolverError: the assignment exceeds the problem's memory limit, which the search ignores.

    Source: Rhino 4.3, optimisation level 2 (7.5).
    """
    # On the whole problem: presolve removes most nodes of a layer, and paths through the rest are meaningless.
    critical = set(backbone(problem, order).critical)
    core = presolve(Core.of(problem, memory=False), effort=REDUCE)
    nodes = core.remaining_nodes()
    place = {int(node): number for number, node in enumerate(nodes)}
    sequence = [place[node] for node in interleaved_order(problem, order).tolist() if node in place]
    pivots = {number for number, node in enumerate(sequence) if int(nodes[node]) in critical}
    choices: IntArray | None = None
    bound = float("inf")
    if core.feasible:
        choices, bound = _solve_segments(core, np.array(sequence, dtype=np.int64), pivots, width, budget)
    assignment = () if choices is None else tuple(choices.tolist())
    cost = float("inf") if choices is None else problem.cost(assignment)
    if choices is not None and not problem.within_limit(problem.peak(assignment)):
        raise SolverError(
            f"the memory limit of {problem.limit:.6g} binds: what was found peaks at {problem.peak(assignment):.6g}. "
            'Segments know no memory; solve the problem with method="auto" or "ilp"'
        )
    return HierarchySolution(assignment, cost, min(bound, cost), len(sequence), len(critical), len(pivots) + 1)


def _solve_segments(
    core: Core, sequence: IntArray, pivots: set[int], width: int, budget: Budget
) -> tuple[IntArray | None, float]:
    """Return strategies of all nodes, None if there are none, and a bound."""
    ordered = core.to_problem(sequence)
    messages = Messages(ordered, range(ordered.size)).run(_ITERATIONS, budget=budget)
    # The message to the source of an edge is the relaxation's least future cost of each of its strategies.
    found = merge_segments(ordered, messages.against, pivots, width)
    if len(found) < ordered.size:
        return None, messages.bound + core.constant
    # Continue towards the cost of the segments, which may be closer to the bound than the rounded one.
    messages.run(_ITERATIONS - messages.iterations, upper=ordered.cost(found), budget=budget)
    places = np.empty(core.nodes, dtype=np.int64)
    places[sequence] = found
    return core.expand(places), messages.bound + core.constant
