"""Assignments that keep the limit: between one that is too large and one that is too dear, then by local changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic

import numpy as np

from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.lagrange import Ascent, Point
from autoshard.solver.moments import Moments
from autoshard.solver.network import Network
from autoshard.solver.problem import Array
from autoshard.solver.search import NOTHING, Found, better

_CAP = 3_000_000
"""Entries of a table in one solve between two assignments."""

_HALVINGS = 14
"""Steps of each bisection."""

_WINDOW = 24
"""Nodes of a window."""

_WINDOW_CAP = 100_000
"""Entries of a table inside a window."""

_PRICE_FACTORS = (0.0, 0.5, 1.0, 1.5)
"""Multiples of the prices under which a window is solved."""


def cross(core: Network, moments: Moments, ascent: Ascent, *, deadline: float = float("inf")) -> Found:
    """Mixes an assignment that passes the limit with one that keeps it, node by node.

    Under one price identical layers flip together, and overshoot. Every node keeps only its strategies in the two
    assignments, which makes exact solves cheap; then prices are raised for the first nodes only, and how many that
    must be is found by bisection: layers flip one at a time.

    Returns:
        The cheapest assignment met that keeps the limit; `NOTHING` if there was none.
    """
    best = ascent.best
    outside, inside = _ends(moments, ascent)
    if outside is None or inside is None:
        return best
    rows = {
        node: np.unique(np.searchsorted(labels, [outside.choices[node], inside.choices[node]]))
        for node, labels in core.labels.items()
    }
    mixed = core.restricted(rows)
    solve = _solver(core, mixed, moments, ascent.prices)
    low, high = 0.0, 1.0
    while high < 1e6:
        found, fits = solve(np.full(len(moments.usages), high))
        if fits:
            best = better(best, found)
            break
        low, high = high, 4 * high
    for _ in range(_HALVINGS):
        if monotonic() > deadline:
            return best
        middle = (low + high) / 2
        found, fits = solve(np.full(len(moments.usages), middle))
        low, high = (low, middle) if fits else (middle, high)
        best = better(best, found) if fits else best
    for reverse in (False, True):
        best = better(best, _ramp(solve, len(moments.usages), low, high, reverse, deadline))
    return best


def _ends(moments: Moments, ascent: Ascent) -> tuple[Point | None, Point | None]:
    """Of the assignments that pass the limit, and of those that keep it, the one that the prices like best."""

    def likes(point: Point) -> float:
        return point.cost + float(ascent.prices @ point.loads)

    inside = [point for point in ascent.points if moments.respected(point.loads)]
    outside = [point for point in ascent.points if not moments.respected(point.loads)]
    return min(outside, key=likes, default=None), min(inside, key=likes, default=None)


Solver = Callable[[Array], tuple[Found, bool]]


def _solver(core: Network, mixed: Network, moments: Moments, prices: Array) -> Solver:
    """Solves the mixed network at prices times a factor per node; says whether the answer keeps the limit."""
    per_node = moments.prices(prices)

    def solve(factors: Array) -> tuple[Found, bool]:
        network = mixed.copy()
        network.usages = {}
        for node, usage in mixed.usages.items():
            if per_node[node] * factors[node]:
                network.add_costs(node, usage * (per_node[node] * factors[node]))
        try:
            exact = eliminate(network, cap=_CAP)
        except WidthError:
            return NOTHING, False
        if not exact.choices:
            return NOTHING, False
        found = Found(exact.choices, core.value(exact.choices))
        return found, moments.respected(moments.loads(found.choices))

    return solve


def _ramp(solve: Solver, count: int, low: float, high: float, reverse: bool, deadline: float) -> Found:
    """The first nodes pay the high price, the others the low one; the fewest that must pay."""
    best = NOTHING
    few, many = 0, count
    while many - few > 1 and monotonic() < deadline:
        middle = (few + many) // 2
        factors = np.where(np.arange(count) < middle, high, low)
        found, fits = solve(factors[::-1] if reverse else factors)
        few, many = (few, middle) if fits else (middle, many)
        best = better(best, found) if fits else best
    return best


def settle(core: Network, moments: Moments, start: Found, *, deadline: float = float("inf")) -> Found:
    """Moves single nodes to cheaper strategies while the limit allows: gives back what was sharded needlessly."""
    choices = dict(start.choices)
    loads = moments.loads(choices)
    places = core.positions(choices)
    assert places is not None
    moved = True
    while moved and monotonic() < deadline:
        moved = False
        for node, vector in core.vectors.items():
            costs = vector
            for other, table in core.edges[node].items():
                costs = costs + table[:, places[other]]
            place = places[node]
            change = core.usages[node] - core.usages[node][place]
            first, last = moments.first[node], moments.last[node]
            slack = float((moments.limit - loads[first:last]).min(initial=np.inf))
            allowed = (change <= max(slack, 0.0)) | (change <= 0)
            choice = int(np.where(allowed, costs, np.inf).argmin())
            if costs[choice] < costs[place] - 1e-12 * abs(start.cost):
                places[node] = choice
                loads[first:last] += change[choice]
                moved = True
    choices = {node: int(core.labels[node][place]) for node, place in places.items()}
    return _checked(core, moments, choices, start)


def windows(
    core: Network,
    moments: Moments,
    prices: Array,
    start: Found,
    *,
    seed: int = 0,
    count: int = 2000,
    patience: int = 16,
    deadline: float = float("inf"),
) -> Found:
    """Solves connected windows exactly at several multiples of the prices, all else held, and keeps what is
    cheaper within the limit. Ends after `count` windows, or after `patience` of them in a row brought nothing."""
    random = np.random.default_rng(seed)
    nodes = sorted(core.vectors)
    per_node = moments.prices(prices)
    best, failures = start, 0
    for _ in range(count if nodes else 0):
        if failures >= patience or monotonic() > deadline:
            break
        window = _grown(core, nodes[int(random.integers(len(nodes)))], random)
        failures += 1
        for factor in _PRICE_FACTORS:
            found = _within(core, window, best, per_node * factor)
            if found.improves(best):
                checked = _checked(core, moments, found.choices, best)
                if checked is not best:
                    best, failures = checked, 0
    return best


def _grown(core: Network, seed: int, random: np.random.Generator) -> list[int]:
    """A connected window around a node, grown at random."""
    window, border = {seed: None}, sorted(core.edges[seed])
    while border and len(window) < _WINDOW:
        node = border.pop(int(random.integers(len(border))))
        if node not in window:
            window[node] = None
            border += sorted(other for other in core.edges[node] if other not in window)
    return list(window)


def _within(core: Network, window: Iterable[int], current: Found, per_node: Array) -> Found:
    """The best choices inside a window, given those outside, at prices per node; cost without prices."""
    inside = Network(core.tables.child())
    for node in window:
        inside.labels[node] = core.labels[node]
        inside.edges[node] = {}
    for node in inside.labels:
        costs = core.vectors[node] + core.usages[node] * per_node[node]
        for other, table in core.edges[node].items():
            if other not in inside.labels:
                costs = costs + table[:, core.labels[other].searchsorted(current.choices[other])]
            elif node < other:
                inside.edges[node][other] = table
                inside.edges[other][node] = inside.tables.transpose(table)
        inside.vectors[node] = inside.tables.intern(costs)
    try:
        exact = eliminate(inside, cap=_WINDOW_CAP)
    except WidthError:
        return NOTHING
    if all(current.choices[node] == choice for node, choice in exact.choices.items()):
        return NOTHING
    left = {node: current.choices[node] for node in core.labels}
    choices = core.expand({**left, **exact.choices})
    return Found(choices, core.value(choices))


def _checked(core: Network, moments: Moments, choices: dict[int, int], fallback: Found) -> Found:
    """The assignment completed and priced, if it keeps the limit and is better; else the fallback."""
    complete = core.expand({node: choices[node] for node in core.labels})
    found = Found(complete, core.value(complete))
    if found.improves(fallback) and moments.respected(moments.loads(complete)):
        return found
    return fallback
