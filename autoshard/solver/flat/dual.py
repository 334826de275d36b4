"""A lower bound under a memory limit: prices on memory over time, and message passing (TRW-S) at these prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import numpy.typing as npt

from autoshard.solver.flat.core import Core, CoreArrays
from autoshard.solver.jit import jit
from autoshard.solver.problem import Array, IntArray


@jit
def price_strategies(view, prices, priced):  # type: ignore[no-untyped-def]
    """Write the cost of the memory of every strategy at a price per byte and moment."""
    # Sums from the first moment on: the price of a life is a difference of two of them.
    total = np.zeros(len(prices) + 1)
    for moment in range(len(prices)):
        total[moment + 1] = total[moment] + prices[moment]
    for node in range(len(view.nodes) - 1):
        offset, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            priced[offset + s] = 0.0
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            span = total[item.high] - total[item.low]
            if span > 0.0:
                for s in range(size):
                    priced[offset + s] += span * view.usage[item.start + s]


@jit
def loads_of(view, places, loads):  # type: ignore[no-untyped-def]
    """Write the bytes of a choice at each moment, without the memory used under any choice."""
    change = np.zeros(len(loads) + 1)
    for node in range(len(view.nodes) - 1):
        for place in range(view.nodes[node].items, view.nodes[node + 1].items):
            item = view.items[place]
            usage = view.usage[item.start + places[node]]
            change[item.low] += usage
            change[item.high] -= usage
    total = 0.0
    for moment in range(len(loads)):
        total += change[moment]
        loads[moment] = total


@jit
def pass_messages(view, unary, messages, backward, widest, beliefs):  # type: ignore[no-untyped-def]
    """Run one pass in the order of the nodes, or in reverse.

    Args:
        view: the core.
        unary: per strategy its cost, prices included.
        messages: the message to each half-edge's node along its edge, from its `message` on; changed.
        backward: True to go from the last node to the first.
        widest: strategies of a node at most.
        beliefs: per strategy unary + messages; changed. After both passes its minima bound the cost.

    Returns:
        The bound, valid after a backward pass.
    """
    count, total = len(view.nodes) - 1, 0.0
    belief, least = np.empty(widest), np.empty(widest)
    for step in range(count):
        node = count - 1 - step if backward else step
        offset, size = view.nodes[node].offset, view.nodes[node].size
        first, last = view.nodes[node].around, view.nodes[node + 1].around
        for s in range(size):
            belief[s] = unary[offset + s]
        later = 0
        for place in range(first, last):
            begin = view.around[place].message
            later += view.around[place].neighbour > node
            for s in range(size):
                belief[s] += messages[begin + s]
        earlier = last - first - later
        share = 1.0 / max(later, earlier, 1)
        smallest = np.inf
        for s in range(size):
            beliefs[offset + s] = belief[s]
            smallest = min(smallest, belief[s])
        # The share of the node's costs on chains that begin here; summed on the way back, these are the chains' optima.
        total += (1.0 - earlier * share) * smallest
        for place in range(first, last):
            half = view.around[place]
            if (half.neighbour < node) != backward:
                continue
            width, into = view.nodes[half.neighbour].size, view.around[half.reverse].message
            for t in range(width):
                least[t] = np.inf
            for s in range(size):
                # Without the message that came along this edge, which would be counted twice.
                value = share * belief[s] - messages[half.message + s]
                row = half.table + s * width
                for t in range(width):
                    least[t] = min(least[t], value + view.table[row + t])
            for t in range(width):
                messages[into + t] = least[t]
    return total


@jit
def round_in_order(view, unary, messages, widest, places):  # type: ignore[no-untyped-def]
    """Write the best choice of each node in order, by its earlier neighbours' choices and its later ones' messages."""
    costs = np.empty(widest)
    for node in range(len(view.nodes) - 1):
        offset, size = view.nodes[node].offset, view.nodes[node].size
        for s in range(size):
            costs[s] = unary[offset + s]
        for place in range(view.nodes[node].around, view.nodes[node + 1].around):
            half = view.around[place]
            if half.neighbour > node:
                for s in range(size):
                    costs[s] += messages[half.message + s]
            else:
                # The other end's row of the table: contiguous where the table is seen from there.
                row = view.around[half.reverse].table + places[half.neighbour] * size
                for s in range(size):
                    costs[s] += view.table[row + s]
        best = 0
        for s in range(1, size):
            if costs[s] < costs[best]:
                best = s
        places[node] = best


_SETTLING = 5
"""Passes at the best prices before floors are read."""

_FRACTION = 0.05
"""The first step, as a share of the one that would close the gap if the bound were linear in the prices."""

_UNKNOWN_GAP = 0.05
"""The gap that is assumed where no choice is known, relative to the bound."""

_GROWTH, _SHRINKING = 1.1, 0.66
"""Factors of the share after a bound that improved, and after `_PATIENCE` bounds that did not."""

_PATIENCE = 20
"""Bounds in a row without improvement after which the step shrinks."""

_NEGLIGIBLE = 1e-4
"""Share below which steps start again from `_FRACTION`."""

_STRETCHES = 16
"""Stretches of time: in each, the fullest moment is the one whose price rises."""


@dataclass
class Dual:
    """Prices on memory, messages, and the best bound of both.

    Attributes:
        core, view: the problem.
        prices: current cost per byte at each moment.
        value: the best bound so far, the core's constant included.
        best_prices: the prices of the best bound.
        upper: least known cost of a choice within the limit.
        best: the best rounded choice within the limit; None while there is none.

    Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006. The prices move
    as in F. Barahona and R. Anbil, "The volume algorithm: producing primal solutions with a subgradient method", 2000:
    always from the best known prices, along an average of the excess of rounded choices above the limit.
    """

    core: Core
    view: CoreArrays
    prices: Array = field(init=False)
    value: float = float("-inf")
    best_prices: Array = field(init=False)
    upper: float = float("inf")
    best: IntArray | None = None

    def __post_init__(self) -> None:
        core = self.core
        self.prices = np.zeros(len(core.base))
        self.best_prices = self.prices.copy()
        self._messages = np.zeros(int(core.size[core.ends].sum()))
        self._widest = int(core.size.max(initial=1))
        self._beliefs = np.zeros(len(core.cost))
        self._memory_costs = np.zeros(len(core.cost))
        self._average = np.zeros(len(core.base))
        self._failures = 0
        self._fraction = _FRACTION
        self._passes = 0
        self._last_pass = np.full(len(core.cost), -1)

    def ascend(self, rounds: int, *, move: bool = True, deadline: float = float("inf")) -> None:
        """Run forward and backward passes; with `move`, prices follow the memory of rounded choices.

        Args:
            rounds: forward and backward passes.
            move: False to move messages only.
            deadline: `time.monotonic()` seconds after which no further pass starts.
        """
        core, view = self.core, self.view
        loads = np.zeros(len(core.base))
        for _ in range(rounds):
            if monotonic() > deadline or self.value >= self.upper:
                return
            before = self.value
            improved = self._pass() > before
            places = self.round_choice()
            self._passes += 1
            self._last_pass[core.offset[:-1] + places] = self._passes
            loads_of(view, places, loads)
            if (loads <= view.room).all():
                cost = core.value(places)
                if cost < self.upper:
                    self.upper, self.best = cost, places
            if move and len(loads):
                self._move_prices(loads - view.room, improved)

    def _pass(self) -> float:
        """Run a forward and a backward pass at the current prices, and return the bound."""
        core, view = self.core, self.view
        price_strategies(view, self.prices, self._memory_costs)
        unary = core.cost + self._memory_costs
        pass_messages(view, unary, self._messages, False, self._widest, self._beliefs)
        self._forward = np.minimum.reduceat(self._beliefs, core.offset[:-1])
        total = pass_messages(view, unary, self._messages, True, self._widest, self._beliefs)
        # The Lagrangian: memory below the limit is paid back at its price, so that the value bounds every assignment
        # within it.
        value = total + core.constant - float(self.prices @ view.room)
        # Sums of many floats.
        value -= 1e-11 * (abs(value) + abs(total))
        if value > self.value:
            self.value, self.best_prices = value, self.prices.copy()
        return value

    def floors(self) -> Array:
        """Return per strategy a bound of all assignments within the limit that use it; as `bound._Chains.floors`."""
        core, view = self.core, self.view
        self.prices = self.best_prices.copy()
        value = max(self._pass() for _ in range(_SETTLING))
        value = self._pass()
        least = np.minimum.reduceat(self._beliefs, core.offset[:-1])
        later_edges = np.bincount(core.ends.min(1, initial=core.nodes), minlength=core.nodes)
        earlier_edges = np.bincount(core.ends.ravel(), minlength=core.nodes) - later_edges
        share = 1.0 / np.maximum(np.maximum(later_edges, earlier_edges), 1)
        ends_after, ends_before = 1.0 - later_edges * share, 1.0 - earlier_edges * share
        optima_before = np.cumsum(ends_after * self._forward) - ends_after * self._forward
        optima_after = ends_before * least
        optima_after = np.cumsum(optima_after[::-1])[::-1] - optima_after
        crossing = np.zeros(core.nodes + 1)
        if len(core.ends):
            earlier, later = core.ends.min(1), core.ends.max(1)
            carried = share[later] * least[later]
            np.add.at(crossing, earlier + 1, carried)
            np.subtract.at(crossing, later, carried)
        elsewhere = optima_before + optima_after + np.cumsum(crossing)[:-1]
        constant = core.constant - float(self.prices @ view.room)
        floors: Array = np.maximum(self._beliefs + np.repeat(elsewhere, core.size) + constant, value)
        # Sums of many floats: what rounding may have added is taken off.
        return floors - 1e-11 * np.abs(floors)

    def round_choice(self) -> IntArray:
        """Return a choice rounded from the current messages; it may exceed the limit."""
        places = np.zeros(self.core.nodes, dtype=np.int64)
        round_in_order(self.view, self.core.cost + self._memory_costs, self._messages, self._widest, places)
        return places

    def recently_chosen(self, passes: int) -> npt.NDArray[np.bool_]:
        """Return per strategy True if a choice rounded in one of the last passes uses it."""
        return self._last_pass > max(self._passes - passes, 0)

    def _move_prices(self, excess: Array, improved: bool) -> None:
        """Move the prices from the best ones: up at the fullest moment of each stretch that exceeds the limit, down
        where there is room.

        The step grows while bounds improve and the direction holds, and shrinks after many that did not; when it has
        become negligible, it starts again.
        """
        if improved:
            self._failures = 0
            if float(excess @ self._average) >= 0.0:
                self._fraction = min(_GROWTH * self._fraction, 2.0)
        else:
            self._failures += 1
            if self._failures >= _PATIENCE:
                self._failures = 0
                self._fraction *= _SHRINKING
                if self._fraction < _NEGLIGIBLE:
                    self._fraction = _FRACTION
        # One rounded choice jumps between strategies; the average approaches the relaxation's own memory.
        self._average = 0.5 * (self._average + excess)
        change = np.where(self.best_prices > 0, np.minimum(self._average, 0.0), 0.0)
        for stretch in np.array_split(np.arange(len(excess)), min(_STRETCHES, len(excess))):
            # Neighbouring moments hold nearly the same items. Raising all of them would count one excess many times.
            fullest = stretch[self._average[stretch].argmax()]
            if self._average[fullest] > 0.0 or self.best_prices[fullest] > 0.0:
                change[fullest] = self._average[fullest]
        gap = self.upper - self.value if np.isfinite(self.upper) else _UNKNOWN_GAP * abs(self.value)
        # Polyak's step: the remaining gap over the squared norm of the direction.
        step = self._fraction * max(gap, 1e-6 * abs(self.value)) / max(float(change @ change), 1e-300)
        self.prices = np.maximum(self.best_prices + step * change, 0.0)
