"""The limit on memory as prices: a price per byte and moment, raised until the cheapest assignment keeps the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from autoshard.solver.bound import Bound, lower_bound
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.linear import Program, minimise
from autoshard.solver.moments import Moments
from autoshard.solver.network import Network
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.reduce import reduce
from autoshard.solver.search import NOTHING, Found, axis_by_axis, better, improve

_CAP = 3_000_000
"""Entries of a table in one priced solve: there are many of them."""

_STEPS = 40
"""Priced solves at most."""

_RELAXED = 25
"""Iterations of the relaxation in one priced solve."""

_PARTS = 3
"""Parts of the time line of which each may contribute a moment per assignment met."""

_HIGHEST = 16.0**6
"""Multiple of the first ceiling on prices at which the ascent gives up finding an assignment within the limit."""

_CLOSE = 1e-7
"""Relative distance between the model of the dual function and its value at which the ascent ends."""


@dataclass(frozen=True, slots=True)
class Point:
    """A priced solve.

    Attributes:
        choices: a complete assignment (node -> strategy of the problem).
        cost: without prices.
        loads: bytes at each moment.
    """

    choices: dict[int, int]
    cost: float
    loads: Array


@dataclass(slots=True)
class Ascent:
    """What the ascent of the dual function has found.

    Attributes:
        points: every distinct assignment met.
        prices: cost per byte at each moment, where the dual function was highest.
        value: the dual function there as far as known: a lower bound if `exact`.
        exact: whether every priced solve was exact.
        best: the cheapest assignment met that keeps the limit.
    """

    points: list[Point] = field(default_factory=list)
    prices: Array = field(default_factory=lambda: np.zeros(0))
    value: float = float("-inf")
    exact: bool = True
    best: Found = NOTHING


def priced(core: Network, moments: Moments, prices: Array) -> Network:
    """The network with the bytes of every node paid for and no limit; what eliminated nodes hold is in the offset."""
    per_node = moments.prices(prices)
    network = core.copy()
    network.usages = {}
    for node, usage in core.usages.items():
        if per_node[node]:
            network.add_costs(node, usage * per_node[node])
    network.offset += sum(float(per_node[node]) * bytes_held for node, bytes_held in core.held.items())
    return network


def ascend(
    core: Network,
    moments: Moments,
    start: Found,
    *,
    components: Sequence[IntArray] | None = None,
    deadline: float = float("inf"),
) -> Ascent:
    """Maximises the dual function by cutting planes.

    Each priced solve gives a cut: the dual function is at most cost + prices · (loads - limit) of any assignment. The
    prices that maximise the least cut are tried next. Only moments at which some assignment met passed the limit
    carry a price: for one such moment this is the secant method, and few ever bind at once.

    Args:
        core: reduced, with usages.
        moments: the limit.
        start: a complete assignment, the optimum without the limit if it is known.
        components: labels per mesh axis, for alternation where a priced solve is too wide to be exact.
        deadline: `time.monotonic()` seconds after which no further priced solve starts.
    """
    state = Ascent(prices=np.zeros(moments.count))
    active: list[int] = []
    _meet(state, core, moments, start.choices, active)
    ceiling = _ceiling(state.points[0], moments)
    highest, warm = ceiling * _HIGHEST, start
    for _ in range(_STEPS):
        if not active or ceiling > highest or monotonic() > deadline:
            break
        prices, model = _model(state, moments, active, ceiling)
        network = priced(core, moments, prices)
        found, floor, exact = _solve(network, warm, components, deadline)
        if not found.choices:
            break
        warm = found
        state.exact &= exact
        value = floor - float(prices.sum()) * moments.limit
        if value > state.value:
            state.value, state.prices = value, prices
        new = _meet(state, core, moments, found.choices, active)
        capped = bool((prices >= 0.99 * ceiling).any())
        if capped and not state.best.choices:
            ceiling *= 16.0
        elif not new or model - value <= _CLOSE * max(abs(value), abs(state.points[0].cost)):
            break
    return state


def _meet(state: Ascent, core: Network, moments: Moments, choices: dict[int, int], active: list[int]) -> bool:
    """Notes an assignment, and the worst moments where it passes the limit; False if nothing about it is new."""
    if any(point.choices == choices for point in state.points):
        return False
    point = Point(choices, core.value(choices), moments.loads(choices))
    state.points.append(point)
    if moments.respected(point.loads):
        state.best = better(state.best, Found(choices, point.cost))
        return True
    for part in np.array_split(np.arange(moments.count), min(_PARTS, moments.count)):
        worst = int(part[point.loads[part].argmax()])
        if point.loads[worst] > moments.limit and worst not in active:
            active.append(worst)
    return True


def _ceiling(point: Point, moments: Moments) -> float:
    """A price at which what the first assignment uses in excess costs twice what it costs."""
    excess = float(point.loads.max() - moments.limit) if moments.count else 0.0
    magnitude = abs(point.cost) if point.cost else 1.0
    return 2.0 * magnitude / max(excess, 1e-9 * abs(moments.limit), 1e-300)


def _model(state: Ascent, moments: Moments, active: list[int], ceiling: float) -> tuple[Array, float]:
    """Prices that maximise the least of the cuts, and that value."""
    magnitude = max(abs(point.cost) for point in state.points) or 1.0
    program = Program()
    names = program.add_variables(np.zeros(len(active)))
    # Maximise the model, which stands in units of `magnitude`; prices stand in units of the ceiling.
    top = program.add_variables(np.array([-1.0]), lower=-1e9, upper=1e9)
    for point in state.points:
        excess = (point.loads[active] - moments.limit) * (ceiling / magnitude)
        program.add_row([*names, *top], np.append(-excess, 1.0), -np.inf, point.cost / magnitude)
    answer = minimise(program, time_limit=10.0)
    prices = np.zeros(moments.count)
    if answer.values is None:
        prices[active] = ceiling
        return prices, float("inf")
    prices[active] = np.clip(answer.values[: len(active)], 0.0, 1.0) * ceiling
    return prices, float(answer.values[-1]) * magnitude


def _solve(
    network: Network, warm: Found, components: Sequence[IntArray] | None, deadline: float
) -> tuple[Found, float, bool]:
    """The cheapest assignment of a priced network and a bound on it: exact where it is narrow enough, else searched
    from the last one met and from the relaxation."""
    try:
        exact = eliminate(network, cap=_CAP)
        return Found(exact.choices, exact.cost), exact.cost, True
    except WidthError:
        relaxed = lower_bound(reduce(network.copy()), iterations=_RELAXED, deadline=deadline)
    found = Found(warm.choices, network.value(warm.choices))
    if relaxed.choices and relaxed.cost < found.cost:
        found = Found(relaxed.choices, relaxed.cost)
    if components is not None and monotonic() < deadline:
        found = axis_by_axis(network, components, found, deadline=deadline)
    return improve(network, found, rounds=8, patience=2, deadline=deadline), relaxed.value, False


def priced_bound(core: Network, moments: Moments, prices: Array, upper: float, deadline: float) -> Bound:
    """The relaxation at given prices: bound and floors are true for every assignment that keeps the limit."""
    constant = float(prices.sum()) * moments.limit
    bound = lower_bound(priced(core, moments, prices), upper=upper + constant, deadline=deadline)
    floors = {node: floor - constant for node, floor in bound.floors.items()}
    return Bound(bound.value - constant, floors, bound.choices, bound.cost - constant, bound.iterations)
