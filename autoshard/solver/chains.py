"""Sequential tree-reweighted message passing (TRW-S) on flat arrays: one kernel for all bounds.

The nodes are ordered, and the graph is covered by chains that ascend in that order. Messages solve each chain exactly,
and the costs of a node are shared evenly by its chains. The sum of the chains' optima is a lower bound, which a pass
forward and a pass backward never lower.

Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from autoshard.solver.jit import compiled_when_called
from autoshard.solver.problem import Array, IntArray

_ROUNDING = 1e-11
"""Relative slack subtracted from every bound, for the rounding of sums of many floats."""

_LANES = 8
"""Running minima kept side by side, so that the compiler vectorises the loop."""

NODE = np.dtype([(name, np.int64) for name in ("size", "offset", "around", "items")], align=True)
HALF = np.dtype([(name, np.int64) for name in ("neighbour", "table", "message", "reverse")], align=True)
DETAIL = np.dtype(
    [*((name, np.int64) for name in ("own", "few", "other", "wide", "turned", "parts", "end")), ("factor", np.float64)],
    align=True,
)
PART = np.dtype([("table", np.int64), ("ratio", np.float64)], align=True)


class ChainGraph(NamedTuple):
    """Nodes in the order of a pass, and their edges, as arrays for the compiled loops.

    Attributes:
        nodes: per node its number of strategies, the start of its strategies among those of all nodes, and of its
            half-edges in `around`; one extra record at the end. `items` is for memory, see `CoreArrays`.
        around: half-edges, sorted by node: the node at the other end, the start of the table in `table`, the start of
            the message to the node along this edge, and the half-edge of the same edge at the other end.
        table: tables, row-major, with the strategies of the half-edge's node as rows. Half-edges may share them.
        details: per half-edge how to read a shared table; empty if every table is that of its edge. `own` and `other`
            are the starts in `classes` of the classes of rows and columns, `few` and `wide` their numbers (those of
            strategies where there are no classes). `turned` is 1 where the rows of the table are the strategies of the
            other end: large tables are stored for one end only. `factor` multiplies the table and the sum of the parts
            from `parts` to `end`.
        parts: further tables of a sum: the start in `table`, and the factor relative to that of the first table.
        classes: per strategy at an end the number of its distinct row or column.
    """

    nodes: Any
    around: Any
    table: Any
    details: Any = np.zeros(0, dtype=DETAIL)
    parts: Any = np.zeros(0, dtype=PART)
    classes: Any = np.zeros(0, dtype=np.int64)


def starts(lengths: IntArray) -> IntArray:
    """Return the starts of rows of these lengths, and the end of the last one."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])


def link_halves(size: IntArray, ends: IntArray) -> tuple[Any, Any, IntArray]:
    """Return the records of nodes and of half-edges without tables, and the positions of half-edges.

    Args:
        size: strategies per node.
        ends: [edges, 2] nodes of rows and columns.

    Returns:
        `nodes` and `around` of a `ChainGraph`; per edge the positions in `around` of its half-edges, [edges, 2].
    """
    owner = ends.ravel()
    order = np.argsort(owner, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    nodes = np.zeros(len(size) + 1, dtype=NODE)
    nodes["size"][:-1] = size
    nodes["offset"] = starts(size)
    nodes["around"] = starts(np.bincount(owner, minlength=len(size)))
    around = np.zeros(len(owner), dtype=HALF)
    around["neighbour"] = ends[:, ::-1].ravel()[order]
    around["message"] = starts(size[owner[order]])[:-1]
    # Ends 2e and 2e + 1 belong to one edge.
    around["reverse"] = place[order ^ 1]
    return nodes, around, place.reshape(-1, 2)


class Chains:
    """Messages on a graph, and the bound that they give.

    They are never normalised, so costs = reparametrised nodes + reparametrised edges exactly at any time, and any
    messages give a valid bound.

    Args:
        graph: the nodes and edges.
        costs: of the strategies of all nodes. Prices of memory may be added at any time.

    Attributes:
        messages: to the node of each half-edge along its edge, from its `message` on.
        beliefs: per strategy its cost plus the messages to it. After a backward pass, the least of a node's beliefs is
            the optimum of its chains, and the others the optima with each strategy.
        value: the sum of the chains' optima after the last iteration: no assignment costs less.
    """

    def __init__(self, graph: ChainGraph, costs: Array) -> None:
        self.graph = graph
        self.costs = costs
        size = graph.nodes["size"][:-1]
        self.offset: IntArray = np.ascontiguousarray(graph.nodes["offset"])
        self._owner = np.repeat(np.arange(len(size)), np.diff(graph.nodes["around"]))
        self.messages = np.zeros(int(size[self._owner].sum()))
        self.beliefs = np.zeros(len(costs))
        self.value = float("-inf")
        self._forward_minima, self._minima = np.zeros(len(size)), np.zeros(len(size))
        self._widest = int(size.max(initial=1))

    def iterate(self) -> float:
        """Run a pass forward and a pass backward, and return the sum of the chains' optima."""
        for backward, minima in ((False, self._forward_minima), (True, self._minima)):
            self.value = float(
                _pass(self.graph, self.costs, self.messages, backward, self._widest, self.beliefs, minima)
            )
        return self.value

    def floors(self) -> Array:
        """Return per strategy a bound of all assignments that use it, by the last iteration."""
        # The optima of the chains that do not contain the node: those that end before it are in the forward minima,
        # those that begin after it in the backward minima, and those with an edge that skips it in the backward minimum
        # of that edge's later node.
        count = len(self._minima)
        neighbour = self.graph.around["neighbour"]
        is_later = neighbour > self._owner
        out = np.bincount(self._owner[is_later], minlength=count)
        into = np.bincount(self._owner[~is_later], minlength=count)
        share = 1.0 / np.maximum(np.maximum(into, out), 1)
        ends_after, ends_before = (1.0 - out * share) * self._forward_minima, (1.0 - into * share) * self._minima
        optima_before = np.cumsum(ends_after) - ends_after
        optima_after = np.cumsum(ends_before[::-1])[::-1] - ends_before
        # An edge crosses the nodes between its ends: a difference array, summed up below.
        crossing = np.zeros(count + 1)
        earlier, later = self._owner[is_later], neighbour[is_later]
        carried = share[later] * self._minima[later]
        np.add.at(crossing, earlier + 1, carried)
        np.subtract.at(crossing, later, carried)
        elsewhere = optima_before + optima_after + np.cumsum(crossing)[:-1]
        # The bound of all assignments also holds for those with the strategy.
        floors: Array = np.maximum(self.beliefs + np.repeat(elsewhere, np.diff(self.offset)), self.value)
        return floors

    def round(self) -> IntArray:
        """Return a strategy per node: the best given those of earlier nodes and the messages of later ones."""
        places = np.zeros(len(self._minima), dtype=np.int64)
        _round(self.graph, self.costs, self.messages, self._widest, places)
        return places


def subtract_rounding(bounds: Any) -> Any:
    """Subtract from one or more bounds what the rounding of sums of many floats may have added."""
    return bounds * (1.0 - _ROUNDING * np.sign(bounds))


@compiled_when_called
def _pass(graph, costs, messages, backward, widest, beliefs, minima):  # type: ignore[no-untyped-def] # pragma: no cover
    """Send the messages of one direction, and write all beliefs and the least belief of every node.

    Returns:
        The sum of the chains' optima, valid after a backward pass.
    """
    nodes, around, table = graph.nodes, graph.around, graph.table
    detailed = len(graph.details) > 0
    count, total = len(nodes) - 1, 0.0
    base, sent, least, blended = np.empty(widest), np.empty(widest), np.empty(widest), np.empty(widest)
    lanes = np.empty(_LANES)
    for step in range(count):
        node = count - 1 - step if backward else step
        size, first, last = nodes[node].size, nodes[node].around, nodes[node + 1].around
        belief = beliefs[nodes[node].offset : nodes[node].offset + size]
        own_costs = costs[nodes[node].offset : nodes[node].offset + size]
        for s in range(size):
            belief[s] = own_costs[s]
        later = 0
        for place in range(first, last):
            later += around[place].neighbour > node
            begin = around[place].message
            message = messages[begin : begin + size]
            for s in range(size):
                belief[s] += message[s]
        earlier = last - first - later
        # Kolmogorov 2006, section 3: a node is on as many chains as it has edges on its busier side, and each of them
        # gets an equal share of its costs.
        share = 1.0 / max(later, earlier, 1)
        smallest = np.inf
        for s in range(size):
            smallest = belief[s] if belief[s] < smallest else smallest
        minima[node] = smallest
        # The share of the node's costs on chains that begin here; summed in the backward pass, the chains' optima.
        if earlier * share < 1.0:
            total += (1.0 - earlier * share) * smallest
        for place in range(first, last):
            neighbour = around[place].neighbour
            if (neighbour < node) != backward:
                continue
            width, into = nodes[neighbour].size, around[around[place].reverse].message
            few, wide, factor, parts, turned = size, width, 1.0, 0, False
            if detailed:
                detail = graph.details[place]
                few, wide, factor, parts = detail.few, detail.wide, detail.factor, detail.end - detail.parts
                turned = detail.turned == 1
            answer = messages[around[place].message : around[place].message + size]
            scale = 1.0 / factor
            for s in range(size):
                # Without the message along this edge, which would be counted twice. Divide by the factor here and
                # multiply below, so that the loops over the table need no factor.
                base[s] = (share * belief[s] - answer[s]) * scale if belief[s] < np.inf else np.inf
            if few < size:
                # Equal rows cost the same for every strategy of the other node: take the minimum per class.
                sent[:few] = np.inf
                for s in range(size):
                    c = graph.classes[graph.details[place].own + s]
                    sent[c] = base[s] if base[s] < sent[c] else sent[c]
            else:
                sent[:size] = base[:size]
            least[:wide] = np.inf
            start = around[place].table
            if turned:
                for t in range(wide):
                    row = table[start + t * few : start + (t + 1) * few]
                    if parts:
                        blended[:few] = row
                        for part in range(graph.details[place].parts, graph.details[place].end):
                            begin, ratio = graph.parts[part].table + t * few, graph.parts[part].ratio
                            more = table[begin : begin + few]
                            for s in range(few):
                                blended[s] += ratio * more[s]
                        row = blended[:few]
                    # A single running minimum would be a chain of dependent steps.
                    lanes[:] = np.inf
                    for begin in range(0, few - _LANES + 1, _LANES):
                        for lane in range(_LANES):
                            through = sent[begin + lane] + row[begin + lane]
                            lanes[lane] = through if through < lanes[lane] else lanes[lane]
                    smallest = lanes.min()
                    for s in range(few - few % _LANES, few):
                        through = sent[s] + row[s]
                        smallest = through if through < smallest else smallest
                    least[t] = smallest
            elif parts == 0:
                # Four rows at once, so that minima are read and written a quarter as often.
                for s in range(0, few - 3, 4):
                    begin = start + s * wide
                    row, row1 = table[begin : begin + wide], table[begin + wide : begin + 2 * wide]
                    row2, row3 = table[begin + 2 * wide : begin + 3 * wide], table[begin + 3 * wide : begin + 4 * wide]
                    sent0, sent1, sent2, sent3 = sent[s], sent[s + 1], sent[s + 2], sent[s + 3]
                    for t in range(wide):
                        a, b, c, d = sent0 + row[t], sent1 + row1[t], sent2 + row2[t], sent3 + row3[t]
                        a = a if a < b else b
                        c = c if c < d else d
                        a = a if a < c else c
                        least[t] = a if a < least[t] else least[t]
                for s in range(few - few % 4, few):
                    row = table[start + s * wide : start + (s + 1) * wide]
                    for t in range(wide):
                        through = sent[s] + row[t]
                        least[t] = through if through < least[t] else least[t]
            else:
                for s in range(few):
                    row = table[start + s * wide : start + (s + 1) * wide]
                    for t in range(wide):
                        blended[t] = sent[s] + row[t]
                    for part in range(graph.details[place].parts, graph.details[place].end):
                        begin, ratio = graph.parts[part].table + s * wide, graph.parts[part].ratio
                        more = table[begin : begin + wide]
                        for t in range(wide):
                            blended[t] += ratio * more[t]
                    for t in range(wide):
                        least[t] = blended[t] if blended[t] < least[t] else least[t]
            message = messages[into : into + width]
            if wide < width:
                # All strategies of a class of columns get the minimum of the class.
                for t in range(width):
                    message[t] = least[graph.classes[graph.details[place].other + t]] * factor
            else:
                for t in range(width):
                    message[t] = least[t] * factor
    return total


@compiled_when_called
def _round(graph, costs, messages, widest, places):  # type: ignore[no-untyped-def] # pragma: no cover
    """Write the best strategy of each node in order, given earlier neighbours' choices and later ones' messages."""
    nodes, around, table = graph.nodes, graph.around, graph.table
    detailed = len(graph.details) > 0
    sums = np.empty(widest)
    for node in range(len(nodes) - 1):
        offset, size = nodes[node].offset, nodes[node].size
        for s in range(size):
            sums[s] = costs[offset + s]
        for place in range(nodes[node].around, nodes[node + 1].around):
            half = around[place]
            if half.neighbour > node:
                for s in range(size):
                    sums[s] += messages[half.message + s]
                continue
            # The row of the table at the other end.
            other, chosen = around[half.reverse], places[half.neighbour]
            if not detailed:
                row = other.table + chosen * size
                for s in range(size):
                    sums[s] += table[row + s]
                continue
            detail = graph.details[half.reverse]
            if detail.few < nodes[half.neighbour].size:
                chosen = graph.classes[detail.own + chosen]
            for s in range(size):
                c = graph.classes[detail.other + s] if detail.wide < size else s
                cell = c * detail.few + chosen if detail.turned == 1 else chosen * detail.wide + c
                pair = table[other.table + cell]
                for part in range(detail.parts, detail.end):
                    pair += graph.parts[part].ratio * table[graph.parts[part].table + cell]
                sums[s] += detail.factor * pair
        best = 0
        for s in range(1, size):
            if sums[s] < sums[best]:
                best = s
        places[node] = best
