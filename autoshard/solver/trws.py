"""TRW-S messages that can start from those of another problem.

Any messages give a lower bound, and good messages a good one. A large problem that repeats a small one starts from the
messages of the small one, which need few changes: where the repetition begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

import numpy as np

from autoshard.solver.jit import compiled_when_called
from autoshard.solver.problem import Array, Edge, IntArray, Problem
from autoshard.solver.tables import equal_rows_and_columns

_ROUNDING = 1e-11
"""Relative slack subtracted from every bound, for the rounding of sums of many floats."""

_PATIENCE = 10
"""Iterations over which progress is judged; a guess that works."""

_MIN_PROGRESS = 0.02
"""Share of the distance to a known cost that these iterations must close to go on; a guess that works."""

_ROUNDING_PERIOD = 5
"""Iterations from one rounded assignment to the next."""

_LANES = 8
"""Running minima kept side by side, so that the compiler vectorises the loop."""

_MIN_GAP_PROGRESS = 0.1
"""Share of the gap that twice `_PATIENCE` iterations must close when the assignment matters, not the bound."""


class _Nodes(NamedTuple):
    """The nodes of a problem as arrays, for the compiled loops.

    Attributes:
        sizes: number of strategies of every node.
        at: start of every node in `costs`.
        costs: of the strategies of all nodes.
        into: the edges to a node from earlier ones, by node.
        into_at: start of every node in `into`.
        out: the edges from a node to later ones, by node.
        out_at: start of every node in `out`.
    """

    sizes: IntArray
    at: IntArray
    costs: Array
    into: IntArray
    into_at: IntArray
    out: IntArray
    out_at: IntArray


class _Edges(NamedTuple):
    """The edges of a problem as arrays, for the compiled loops.

    Attributes:
        up: messages to the later node of every edge.
        up_at: start of every edge in `up`.
        down: messages to the earlier node of every edge.
        down_at: start of every edge in `down`.
        tables: the distinct tables, flat.
        table: start in `tables` of every part of an edge's cost.
        part_at: start of every edge in `table` and `factor`.
        factor: of every part.
        classes: for every strategy at an end, the number of its distinct row or column.
        ends: for every edge, the start of its row classes in `classes` and their number, then those of its columns.
    """

    up: Array
    up_at: IntArray
    down: Array
    down_at: IntArray
    tables: Array
    table: IntArray
    part_at: IntArray
    factor: Array
    classes: IntArray
    ends: IntArray


@dataclass(frozen=True, slots=True)
class RelaxationResult:
    """The result of some iterations.

    Attributes:
        bound: no assignment costs less.
        assignment: the best one rounded meanwhile; empty if none was finite.
        cost: of that assignment; `inf` without one.
        iterations: forward and backward passes.
    """

    bound: float
    assignment: tuple[int, ...]
    cost: float
    iterations: int


class Messages:
    """Sequential tree-reweighted message passing on a problem without reduction and without its memory limit.

    The nodes are ordered, and the graph is covered by chains that ascend in that order. A forward and a backward pass
    solve each chain exactly, with the costs of a node shared evenly by its chains. They never lower the sum of the
    chains' optima, which is the bound.

    Args:
        problem: the problem.
        order: per node, its place in a pass; equal ones by their number. Nodes that depend on each other should be
            close.

    Attributes:
        along: per edge, the message to its target.
        against: per edge, the message to its source.

    Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006.
    """

    def __init__(self, problem: Problem, order: Sequence[float]) -> None:
        self.problem = problem
        self.sizes = np.array([len(vector) for vector in problem.costs], dtype=np.int64)
        rank = np.empty(problem.size, dtype=np.int64)
        self.sequence = np.argsort(np.asarray(order, dtype=np.float64), kind="stable")
        rank[self.sequence] = np.arange(problem.size)
        source = np.array([edge.source for edge in problem.edges], dtype=np.int64)
        target = np.array([edge.target for edge in problem.edges], dtype=np.int64)
        # Messages run between the earlier and the later node of an edge; tables keep the rows of the source. `turned`
        # edges have the later node at their rows.
        self.earlier = np.where(rank[source] < rank[target], source, target)
        self.later = np.where(rank[source] < rank[target], target, source)
        self.turned = rank[source] > rank[target]
        self.at = _starts(self.sizes)
        self.costs = np.concatenate([*problem.costs, np.zeros(0)])
        self._lay_tables()
        self.up_at, self.down_at = _starts(self.sizes[self.later]), _starts(self.sizes[self.earlier])
        self.up, self.down = np.zeros(self.up_at[-1]), np.zeros(self.down_at[-1])
        self.out, self.out_at = _group_edges(self.earlier, problem.size)
        self.into, self.into_at = _group_edges(self.later, problem.size)
        # Kolmogorov 2006, section 3: a node lies on as many chains as it has edges on its busier side, and each of them
        # gets an even share of its costs.
        widest = np.maximum(np.diff(self.out_at), np.diff(self.into_at))
        self.share = 1.0 / np.maximum(widest, 1)
        self.belief = np.zeros(len(self.costs))

    def _lay_tables(self) -> None:
        """Concatenate the distinct tables; for edges of one table, only one of equal rows and one of equal columns."""
        # A table that is alone on its edge is stored by classes of rows and columns; as a part of a sum it is stored
        # whole, since the parts of a sum rarely have the same classes.
        places: dict[tuple[int, bool], int] = {}
        # Single table of an edge -> its row of `ends`.
        alone: dict[int, tuple[int, int, int, int]] = {}
        parts, classes, length, classed = [], [], 0, 0
        factors, tables, ends = [], [], []
        for edge in self.problem.edges:
            single = len(edge.parts) == 1
            for factor, table in edge.parts:
                if (id(table), single) not in places:
                    classes_of = equal_rows_and_columns(table) if single else None
                    if classes_of is not None:
                        rows, columns = classes_of
                        alone[id(table)] = (classed, len(rows.first), classed + len(rows.number), len(columns.first))
                        classes += [rows.number, columns.number]
                        classed += sum(table.shape)
                    places[id(table), single] = length
                    parts.append((table if classes_of is None else table[np.ix_(rows.first, columns.first)]).ravel())
                    length += parts[-1].size
                factors.append(factor)
                tables.append(places[id(table), single])
            height, width = edge.shape
            ends.append(
                alone[id(edge.parts[0][1])] if single and id(edge.parts[0][1]) in alone else (0, height, 0, width)
            )
        self.factor = np.array(factors, dtype=np.float64)
        self.table = np.array(tables, dtype=np.int64)
        self.part_at = _starts(np.array([len(edge.parts) for edge in self.problem.edges], dtype=np.int64))
        self.tables = np.concatenate([*parts, np.zeros(0)])
        self.classes = np.concatenate([*classes, np.zeros(0, dtype=np.int64)])
        # Per edge: the start of its row classes in `classes` and their number, then the same for its columns. Where the
        # number is that of the strategies, there are no classes.
        self.ends = np.array(ends, dtype=np.int64).reshape(-1, 4)

    @property
    def along(self) -> list[Array]:
        return [self._message(edge, to_later=not turned) for edge, turned in enumerate(self.turned)]

    @property
    def against(self) -> list[Array]:
        return [self._message(edge, to_later=bool(turned)) for edge, turned in enumerate(self.turned)]

    def _message(self, edge: int, *, to_later: bool) -> Array:
        values, at = (self.up, self.up_at) if to_later else (self.down, self.down_at)
        return values[at[edge] : at[edge + 1]]

    def start_from(self, along: Sequence[Array | None], against: Sequence[Array | None]) -> None:
        """Start from these messages; None leaves a message zero."""
        for edge, (to_target, to_source) in enumerate(zip(along, against, strict=True)):
            turned = bool(self.turned[edge])
            for message, to_later in ((to_target, not turned), (to_source, turned)):
                if message is not None:
                    self._message(edge, to_later=to_later)[:] = message

    def run(
        self,
        iterations: int,
        *,
        upper: float = float("inf"),
        close: float = 0.0,
        patient: bool = False,
        deadline: float = float("inf"),
        progress: Callable[[float, float], None] | None = None,
    ) -> RelaxationResult:
        """Run forward and backward passes.

        Args:
            iterations: at most.
            upper: cost of a known assignment: the search ends when the bound reaches it, or hardly approaches it.
            close: relative distance of the bound to the least known cost at which the search ends.
            patient: True to go on while the rounded assignment improves, which takes longer than the bound.
            deadline: `time.monotonic()` seconds after which no further iteration starts.
            progress: called with the least cost and the highest bound so far, now and then.
        """
        history: list[float] = []
        gaps: list[float] = []
        rounded: tuple[int, ...] = ()
        cost = float("inf")
        while len(history) < iterations:
            value = self._forward_backward()
            # In exact arithmetic no pass lowers the bound; the maximum keeps rounding out of the measure of progress.
            history.append(max(value, history[-1]) if history else value)
            # The first rounded assignments are seldom better than a known one.
            early = np.isfinite(upper) and len(history) < _ROUNDING_PERIOD
            if not early and (len(history) % _ROUNDING_PERIOD == 1 or len(history) == iterations):
                choice = self._round_assignment()
                choice_cost = self.problem.cost(choice)
                if choice_cost < cost:
                    rounded, cost = choice, choice_cost
                if progress is not None:
                    progress(cost, history[-1])
            target = min(upper, cost)
            if history[-1] >= target - max(close, 1e-9) * abs(target) or monotonic() > deadline:
                break
            gaps.append(target - history[-1])
            if _is_gap_stalled(gaps) if patient else _is_stalled(history, target):
                break
        best = history[-1] if history else -np.inf
        lowered = best - _ROUNDING * abs(best) if np.isfinite(best) else best
        return RelaxationResult(lowered, rounded, cost, len(history))

    def strategies_within(self, slack: float | Array) -> list[IntArray]:
        """Return per node the strategies of assignments that cost at most `slack` above the bound, ascending.

        The slack is one number for all nodes, or one for each. The increase of the bound by a strategy comes from the
        last backward pass and holds for the bound before that pass: the result is exact up to the gain of this pass.
        """
        ends = zip(self.at[:-1], self.at[1:], strict=True)
        # After a pass back, the least of a node's beliefs is the optimum of its chains, and the others the optima with
        # each strategy: the difference is what that strategy adds to the bound.
        beliefs = (self.belief[first:last] for first, last in ends)
        slacks = np.broadcast_to(slack, self.problem.size)
        return [np.flatnonzero(costs <= costs.min() + most) for costs, most in zip(beliefs, slacks, strict=True)]

    def _forward_backward(self) -> float:
        nodes, edges = self._arrays()
        # Forward along the order, then backward.
        _pass(self.sequence, nodes, edges, self.share, self.belief, self.turned, self.later, True)
        _pass(self.sequence[::-1].copy(), nodes, edges, self.share, self.belief, ~self.turned, self.earlier, False)
        return float(_value(self.sizes, self.at, self.into_at, self.share, self.belief))

    def _arrays(self) -> tuple[_Nodes, _Edges]:
        nodes = _Nodes(self.sizes, self.at, self.costs, self.into, self.into_at, self.out, self.out_at)
        edges = _Edges(
            up=self.up,
            up_at=self.up_at,
            down=self.down,
            down_at=self.down_at,
            tables=self.tables,
            table=self.table,
            part_at=self.part_at,
            factor=self.factor,
            classes=self.classes,
            ends=self.ends,
        )
        return nodes, edges

    def _round_assignment(self) -> tuple[int, ...]:
        choice = _round(self.sequence, *self._arrays(), self.turned, self.earlier)
        return tuple(choice.tolist())


def restrict_messages(
    problem: Problem, along: Sequence[Array], against: Sequence[Array], kept: Sequence[IntArray]
) -> tuple[list[Array], list[Array]]:
    """Return the messages along and against every edge, restricted to some strategies of every node."""
    return (
        [message[kept[edge.target]] for message, edge in zip(along, problem.edges, strict=True)],
        [message[kept[edge.source]] for message, edge in zip(against, problem.edges, strict=True)],
    )


def restrict_problem(problem: Problem, kept: Sequence[IntArray]) -> Problem:
    """Return a problem with the costs of some strategies of every node; equal restrictions of a table stay one
    object."""
    # Holds the tables, so that ids stay unique.
    cut: dict[tuple[int, bytes, bytes], tuple[Array, Array]] = {}
    names = [rows.tobytes() for rows in kept]
    edges = []
    for edge in problem.edges:
        costs = edge.costs
        key = id(costs), names[edge.source], names[edge.target]
        if key not in cut:
            cut[key] = costs, costs[np.ix_(kept[edge.source], kept[edge.target])]
        edges.append(Edge(edge.source, edge.target, cut[key][1]))
    return Problem(tuple(vector[rows] for vector, rows in zip(problem.costs, kept, strict=True)), tuple(edges))


def _is_stalled(history: Sequence[float], target: float) -> bool:
    if len(history) <= _PATIENCE or not np.isfinite(target):
        return False
    before = history[-1 - _PATIENCE]
    return history[-1] - before < _MIN_PROGRESS * (target - before)


def _is_gap_stalled(gaps: Sequence[float]) -> bool:
    """Return True if the best assignment and the bound have hardly come closer for long."""
    window = 2 * _PATIENCE
    return len(gaps) > window and gaps[-1] > (1.0 - _MIN_GAP_PROGRESS) * gaps[-1 - window]


def _starts(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _group_edges(ends: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Return the edges sorted by the node at one end, and the start of each node in them."""
    order = np.argsort(ends, kind="stable")
    return order, np.searchsorted(ends[order], np.arange(count + 1))


@compiled_when_called
def _pass(sequence, nodes, edges, share, belief, turned, to, forward):  # type: ignore[no-untyped-def] # pragma: no cover
    """Update every node in turn from its messages, and send messages to the nodes after it.

    The rows of a table that is `turned` belong to those nodes. Strategies with equal rows send the least of their
    costs; those with equal columns receive one message.
    """
    sizes, at, costs, into, into_at, out, out_at = nodes
    up, up_at, down, down_at, tables, table, part_at, factor, classes, ends = edges
    most = sizes.max() if len(sizes) else 0
    base, blended, lanes = np.empty(most), np.empty(most), np.empty(_LANES)
    sent_costs, minima = np.empty(most), np.empty(most)
    for node in sequence:
        size = sizes[node]
        costs_here = belief[at[node] : at[node] + size]
        for s in range(size):
            costs_here[s] = costs[at[node] + s]
        for k in range(into_at[node], into_at[node + 1]):
            start = up_at[into[k]]
            for s in range(size):
                costs_here[s] += up[start + s]
        for k in range(out_at[node], out_at[node + 1]):
            start = down_at[out[k]]
            for s in range(size):
                costs_here[s] += down[start + s]
        first, last = (out_at[node], out_at[node + 1]) if forward else (into_at[node], into_at[node + 1])
        for k in range(first, last):
            edge = out[k] if forward else into[k]
            width = sizes[to[edge]]
            sent, received = (up_at[edge], down_at[edge]) if forward else (down_at[edge], up_at[edge])
            message = up[sent : sent + width] if forward else down[sent : sent + width]
            answer = down if forward else up
            # The message that came along this edge is left out, lest it be counted twice.
            for s in range(size):
                base[s] = share[node] * costs_here[s] - answer[received + s] if costs_here[s] < np.inf else np.inf
            sender_side, receiver_side = (2, 0) if turned[edge] else (0, 2)
            few, wide = ends[edge, sender_side + 1], ends[edge, receiver_side + 1]
            # Equal rows cost the same for every strategy of the other node: the least of a class stands for all of
            # them.
            if few < size:
                sent_costs[:few] = np.inf
                for s in range(size):
                    c = classes[ends[edge, sender_side] + s]
                    sent_costs[c] = base[s] if base[s] < sent_costs[c] else sent_costs[c]
            else:
                sent_costs[:size] = base[:size]
            part = part_at[edge]
            parts = part_at[edge + 1] - part
            times = factor[part]
            minima[:wide] = np.inf
            if turned[edge]:
                for t in range(wide):
                    place = t * few
                    row = tables[table[part] + place : table[part] + place + few]
                    # A single running minimum would be a chain of dependent steps.
                    lanes[:] = np.inf
                    if parts == 1:
                        for start in range(0, few - _LANES + 1, _LANES):
                            for lane in range(_LANES):
                                through = sent_costs[start + lane] + times * row[start + lane]
                                lanes[lane] = through if through < lanes[lane] else lanes[lane]
                        least = lanes.min()
                        for s in range(few - few % _LANES, few):
                            through = sent_costs[s] + times * row[s]
                            least = through if through < least else least
                    else:
                        for s in range(few):
                            blended[s] = times * row[s]
                        for extra in range(part + 1, part + parts):
                            more = tables[table[extra] + place : table[extra] + place + few]
                            for s in range(few):
                                blended[s] += factor[extra] * more[s]
                        for start in range(0, few - _LANES + 1, _LANES):
                            for lane in range(_LANES):
                                through = sent_costs[start + lane] + blended[start + lane]
                                lanes[lane] = through if through < lanes[lane] else lanes[lane]
                        least = lanes.min()
                        for s in range(few - few % _LANES, few):
                            through = sent_costs[s] + blended[s]
                            least = through if through < least else least
                    minima[t] = least
            else:
                for s in range(few):
                    # A forbidden strategy adds nothing to a minimum.
                    if sent_costs[s] == np.inf:
                        continue
                    place = s * wide
                    row = tables[table[part] + place : table[part] + place + wide]
                    if parts == 1:
                        for t in range(wide):
                            through = sent_costs[s] + times * row[t]
                            minima[t] = through if through < minima[t] else minima[t]
                    elif parts == 2:
                        more = tables[table[part + 1] + place : table[part + 1] + place + wide]
                        for t in range(wide):
                            through = sent_costs[s] + times * row[t] + factor[part + 1] * more[t]
                            minima[t] = through if through < minima[t] else minima[t]
                    else:
                        for t in range(wide):
                            blended[t] = sent_costs[s] + times * row[t]
                        for extra in range(part + 1, part + parts):
                            more = tables[table[extra] + place : table[extra] + place + wide]
                            for t in range(wide):
                                blended[t] += factor[extra] * more[t]
                        for t in range(wide):
                            minima[t] = blended[t] if blended[t] < minima[t] else minima[t]
            # All strategies of a class of columns receive the one minimum of the class.
            if wide < width:
                for t in range(width):
                    message[t] = minima[classes[ends[edge, receiver_side] + t]]
            else:
                message[:] = minima[:width]


@compiled_when_called
def _value(sizes, at, into_at, share, belief):  # type: ignore[no-untyped-def] # pragma: no cover
    """Return the sum of the optima of all chains, each known at its first node after a backward pass."""
    total = 0.0
    for node in range(len(sizes)):
        # The share of the node's costs on chains that begin here: all of them less those that came along an edge.
        starting_share = 1.0 - (into_at[node + 1] - into_at[node]) * share[node]
        if starting_share > 0.0:
            total += starting_share * belief[at[node] : at[node] + sizes[node]].min()
    return total


@compiled_when_called
def _round(sequence, nodes, edges, turned, earlier):  # type: ignore[no-untyped-def] # pragma: no cover
    """Choose for every node in turn the best strategy, given the nodes before it and the messages of those after it."""
    sizes, at, costs, into, into_at, out, out_at = nodes
    _, _, down, down_at, tables, table, part_at, factor, classes, ends = edges
    choice = np.zeros(len(sizes), dtype=np.int64)
    for node in sequence:
        size = sizes[node]
        costs_here = costs[at[node] : at[node] + size].copy()
        for k in range(out_at[node], out_at[node + 1]):
            start = down_at[out[k]]
            for s in range(size):
                costs_here[s] += down[start + s]
        for k in range(into_at[node], into_at[node + 1]):
            edge = into[k]
            sender_side, receiver_side = (0, 2) if turned[edge] else (2, 0)
            chosen, width = choice[earlier[edge]], ends[edge, 3]
            if ends[edge, receiver_side + 1] < sizes[earlier[edge]]:
                chosen = classes[ends[edge, receiver_side] + chosen]
            # The cost of every strategy beside the choice of the earlier node: a column of the table, or a row of it.
            first, step = (chosen, width) if turned[edge] else (chosen * width, 1)
            for part in range(part_at[edge], part_at[edge + 1]):
                for s in range(size):
                    c = classes[ends[edge, sender_side] + s] if ends[edge, sender_side + 1] < size else s
                    costs_here[s] += factor[part] * tables[table[part] + first + c * step]
        choice[node] = costs_here.argmin()
    return choice
