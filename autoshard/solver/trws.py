"""Messages that carry a lower bound over from one problem to a larger one that is made of the same parts.

Any messages whatever make a lower bound; good ones make a good bound. So messages that were found on a small problem,
laid along a large one that repeats it, need only be mended where the repetition begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autoshard.solver.equal_rows import equal_rows_and_columns
from autoshard.solver.jit import compiled_when_called
from autoshard.solver.problem import Array, Edge, IntArray, Problem

_ROUNDING = 1e-11
"""Relative slack taken off every bound: sums of many floats."""

_PATIENCE = 10
"""Iterations over which progress is judged."""

_MIN_PROGRESS = 0.02
"""Part of the distance to a known cost that so many iterations must close to go on."""

_ROUNDING_PERIOD = 5
"""Iterations from one assignment that is rounded to the next."""

_LANES = 8
"""Least elements that are looked for side by side, as a processor does."""

_MIN_GAP_PROGRESS = 0.1
"""Part of the gap that twice as many iterations must close where assignments matter, not the bound."""


@dataclass(frozen=True, slots=True)
class RelaxationResult:
    """What some iterations have found.

    Attributes:
        bound: no assignment costs less.
        assignment: the best one rounded on the way; empty if none was finite.
        cost: of that assignment; `inf` without one.
        iterations: passes there and back.
    """

    bound: float
    assignment: tuple[int, ...]
    cost: float
    iterations: int


class Messages:
    """Sequential tree-reweighted message passing on a problem as it stands, without reduction.

    The nodes are ordered; the graph falls into chains that rise in that order. A pass there and back solves each
    chain exactly, the costs of a node shared evenly by its chains, and never lowers the sum of their optima, which is
    the bound. The problem's memory limit plays no part.

    Args:
        problem: the problem.
        order: per node, where it comes in a pass; equal ones by their number. Nodes that depend on each other should
            be close.

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
        widest = np.maximum(np.diff(self.out_at), np.diff(self.into_at))
        self.share = 1.0 / np.maximum(widest, 1)
        self.belief = np.zeros(len(self.costs))

    def _lay_tables(self) -> None:
        """Every distinct table once; `turned` says whether the later end of an edge has its rows.

        Of rows that are alike, and of columns, there is one, where an edge has but one table: `classes` says which.
        """
        places: dict[tuple[int, bool], int] = {}
        alone: dict[int, tuple[int, int, int, int]] = {}  # table of an edge that has no other -> where its classes are
        parts, classes, length, classed = [], [], 0, 0
        factors, tables, ends = [], [], []
        for edge in self.problem.edges:
            single = len(edge.parts) == 1
            for factor, table in edge.parts:
                if (id(table), single) not in places:
                    found = equal_rows_and_columns(table) if single else None
                    if found is not None:
                        rows, columns = found
                        alone[id(table)] = (classed, len(rows.first), classed + len(rows.number), len(columns.first))
                        classes += [rows.number, columns.number]
                        classed += sum(table.shape)
                    places[id(table), single] = length
                    parts.append((table if found is None else table[np.ix_(rows.first, columns.first)]).ravel())
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
        """Begin with these messages; nothing where there is None."""
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
        """Some passes there and back.

        Args:
            iterations: at most.
            upper: cost of a known assignment: what ends the search when the bound reaches it, or hardly nears it.
            close: relative distance of the bound to the least known cost at which it ends.
            patient: go on where the bound hardly rises, while what is rounded gets better: that settles long after it.
            deadline: `time.monotonic()` seconds after which no further iteration starts.
            progress: told the least cost and the highest bound so far, now and then.
        """
        history: list[float] = []
        gaps: list[float] = []
        rounded: tuple[int, ...] = ()
        cost = float("inf")
        while len(history) < iterations:
            value = self._forward_backward()
            history.append(max(value, history[-1]) if history else value)
            # What is rounded first is seldom better than an assignment that is known.
            early = np.isfinite(upper) and len(history) < _ROUNDING_PERIOD
            if not early and (len(history) % _ROUNDING_PERIOD == 1 or len(history) == iterations):
                choice = self._round_assignment()
                found = self.problem.cost(choice)
                if found < cost:
                    rounded, cost = choice, found
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
        """Per node, the strategies that an assignment may use which costs at most `slack` above the bound, ascending.

        The slack is one for all nodes, or one for each.

        What a strategy adds to the bound is told by the last pass back. It holds for the bound before that pass; the
        answer is exact as far as this one did not raise it.
        """
        ends = zip(self.at[:-1], self.at[1:], strict=True)
        own = (self.belief[first:last] for first, last in ends)
        most = np.broadcast_to(slack, self.problem.size)
        return [np.flatnonzero(costs <= costs.min() + one) for costs, one in zip(own, most, strict=True)]

    def _forward_backward(self) -> float:
        belief = self.belief
        arrays = (
            self.sizes, self.at, self.costs, self.into, self.into_at, self.out, self.out_at, self.up, self.up_at,
            self.down, self.down_at, self.share, self.tables, self.table, self.part_at, self.factor, self.classes,
            self.ends, belief,
        )  # fmt: skip
        _pass(self.sequence, *arrays, self.turned, self.later, True)
        _pass(self.sequence[::-1].copy(), *arrays, ~self.turned, self.earlier, False)
        return float(_value(self.sizes, self.at, self.into_at, self.share, belief))

    def _round_assignment(self) -> tuple[int, ...]:
        choice = _round(
            self.sequence, self.sizes, self.at, self.costs, self.into, self.into_at, self.out, self.out_at, self.down,
            self.down_at, self.tables, self.table, self.part_at, self.factor, self.classes, self.ends, self.turned,
            self.earlier,
        )  # fmt: skip
        return tuple(int(one) for one in choice)


def restrict_messages(
    problem: Problem, along: Sequence[Array], against: Sequence[Array], kept: Sequence[IntArray]
) -> tuple[list[Array], list[Array]]:
    """What is sent along and against every edge of a problem, to some strategies of every node alone."""
    return (
        [message[kept[edge.target]] for message, edge in zip(along, problem.edges, strict=True)],
        [message[kept[edge.source]] for message, edge in zip(against, problem.edges, strict=True)],
    )


def restrict_problem(problem: Problem, kept: Sequence[IntArray]) -> Problem:
    """The costs of a problem with some strategies of every node alone; equal tables cut alike stay one."""
    cut: dict[tuple[int, bytes, bytes], tuple[Array, Array]] = {}  # what a key names by identity stays alive
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
    """Whether the best assignment and the bound have hardly come closer for long."""
    window = 2 * _PATIENCE
    return len(gaps) > window and gaps[-1] > (1.0 - _MIN_GAP_PROGRESS) * gaps[-1 - window]


def _starts(lengths: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _group_edges(ends: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Edges sorted by the node at one end, and where each node's begin."""
    order = np.argsort(ends, kind="stable")
    return order, np.searchsorted(ends[order], np.arange(count + 1))


@compiled_when_called
def _pass(  # type: ignore[no-untyped-def] # pragma: no cover
    sequence, sizes, at, costs, into, into_at, out, out_at, up, up_at, down, down_at, share, tables, table, part_at,
    factor, classes, ends, belief, turned, to, forward,
):  # fmt: skip
    """Every node in turn gathers what it was told, and tells the nodes after it; the rows of a table that is `turned`
    are theirs. What strategies with one row tell is the least of them; what those with one column are told is one."""
    most = sizes.max() if len(sizes) else 0
    base, blended, lanes = np.empty(most), np.empty(most), np.empty(_LANES)
    mine, theirs = np.empty(most), np.empty(most)
    for node in sequence:
        size = sizes[node]
        own = belief[at[node] : at[node] + size]
        for s in range(size):
            own[s] = costs[at[node] + s]
        for k in range(into_at[node], into_at[node + 1]):
            start = up_at[into[k]]
            for s in range(size):
                own[s] += up[start + s]
        for k in range(out_at[node], out_at[node + 1]):
            start = down_at[out[k]]
            for s in range(size):
                own[s] += down[start + s]
        first, last = (out_at[node], out_at[node + 1]) if forward else (into_at[node], into_at[node + 1])
        for k in range(first, last):
            edge = out[k] if forward else into[k]
            width = sizes[to[edge]]
            told, heard = (up_at[edge], down_at[edge]) if forward else (down_at[edge], up_at[edge])
            message = up[told : told + width] if forward else down[told : told + width]
            answer = down if forward else up
            for s in range(size):
                base[s] = share[node] * own[s] - answer[heard + s] if own[s] < np.inf else np.inf
            here, there = (2, 0) if turned[edge] else (0, 2)
            few, wide = ends[edge, here + 1], ends[edge, there + 1]
            if few < size:
                mine[:few] = np.inf
                for s in range(size):
                    c = classes[ends[edge, here] + s]
                    mine[c] = base[s] if base[s] < mine[c] else mine[c]
            else:
                mine[:size] = base[:size]
            part = part_at[edge]
            parts = part_at[edge + 1] - part
            times = factor[part]
            theirs[:wide] = np.inf
            if turned[edge]:
                for t in range(wide):
                    place = t * few
                    row = tables[table[part] + place : table[part] + place + few]
                    lanes[:] = np.inf
                    if parts == 1:
                        for start in range(0, few - _LANES + 1, _LANES):
                            for lane in range(_LANES):
                                through = mine[start + lane] + times * row[start + lane]
                                lanes[lane] = through if through < lanes[lane] else lanes[lane]
                        least = lanes.min()
                        for s in range(few - few % _LANES, few):
                            through = mine[s] + times * row[s]
                            least = through if through < least else least
                    else:
                        for s in range(few):
                            blended[s] = times * row[s]
                        for other in range(part + 1, part + parts):
                            more = tables[table[other] + place : table[other] + place + few]
                            for s in range(few):
                                blended[s] += factor[other] * more[s]
                        for start in range(0, few - _LANES + 1, _LANES):
                            for lane in range(_LANES):
                                through = mine[start + lane] + blended[start + lane]
                                lanes[lane] = through if through < lanes[lane] else lanes[lane]
                        least = lanes.min()
                        for s in range(few - few % _LANES, few):
                            through = mine[s] + blended[s]
                            least = through if through < least else least
                    theirs[t] = least
            else:
                for s in range(few):
                    if mine[s] == np.inf:
                        continue
                    place = s * wide
                    row = tables[table[part] + place : table[part] + place + wide]
                    if parts == 1:
                        for t in range(wide):
                            through = mine[s] + times * row[t]
                            theirs[t] = through if through < theirs[t] else theirs[t]
                    elif parts == 2:
                        more = tables[table[part + 1] + place : table[part + 1] + place + wide]
                        for t in range(wide):
                            through = mine[s] + times * row[t] + factor[part + 1] * more[t]
                            theirs[t] = through if through < theirs[t] else theirs[t]
                    else:
                        for t in range(wide):
                            blended[t] = mine[s] + times * row[t]
                        for other in range(part + 1, part + parts):
                            more = tables[table[other] + place : table[other] + place + wide]
                            for t in range(wide):
                                blended[t] += factor[other] * more[t]
                        for t in range(wide):
                            theirs[t] = blended[t] if blended[t] < theirs[t] else theirs[t]
            if wide < width:
                for t in range(width):
                    message[t] = theirs[classes[ends[edge, there] + t]]
            else:
                message[:] = theirs[:width]


@compiled_when_called
def _value(sizes, at, into_at, share, belief):  # type: ignore[no-untyped-def] # pragma: no cover
    """The optima of all chains, each found at its first node by a pass back."""
    total = 0.0
    for node in range(len(sizes)):
        begun = 1.0 - (into_at[node + 1] - into_at[node]) * share[node]
        if begun > 0.0:
            total += begun * belief[at[node] : at[node] + sizes[node]].min()
    return total


@compiled_when_called
def _round(  # type: ignore[no-untyped-def] # pragma: no cover
    sequence, sizes, at, costs, into, into_at, out, out_at, down, down_at, tables, table, part_at, factor,
    classes, ends, turned, earlier,
):  # fmt: skip
    """Every node in turn takes what is best given the nodes before it, and what those after it tell."""
    choice = np.zeros(len(sizes), dtype=np.int64)
    for node in sequence:
        size = sizes[node]
        own = costs[at[node] : at[node] + size].copy()
        for k in range(out_at[node], out_at[node + 1]):
            start = down_at[out[k]]
            for s in range(size):
                own[s] += down[start + s]
        for k in range(into_at[node], into_at[node + 1]):
            edge = into[k]
            here, there = (0, 2) if turned[edge] else (2, 0)
            taken, width = choice[earlier[edge]], ends[edge, 3]
            if ends[edge, there + 1] < sizes[earlier[edge]]:
                taken = classes[ends[edge, there] + taken]
            first, step = (taken, width) if turned[edge] else (taken * width, 1)
            for part in range(part_at[edge], part_at[edge + 1]):
                for s in range(size):
                    c = classes[ends[edge, here] + s] if ends[edge, here + 1] < size else s
                    own[s] += factor[part] * tables[table[part] + first + c * step]
        choice[node] = own.argmin()
    return choice
