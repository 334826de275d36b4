"""A lower bound under a memory limit: prices on memory over time, and message passing (`chains.py`) at these prices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autoshard.solver.ascent import Ascent
from autoshard.solver.chains import Chains, subtract_rounding
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.jit import jit
from autoshard.solver.problem import Array, IntArray


@jit
def price_strategies(view, prices, priced):  # type: ignore[no-untyped-def]
    """Write the cost of the memory of every strategy at a price per byte and moment."""
    # Prefix sums: the price of a life is a difference of two of them.
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


_SETTLING = 5
"""Passes at the best prices before floors are read."""

_FRACTION = 0.05
"""The first step, as a share of the one that would close the gap if the bound were linear in the prices."""

_UNKNOWN_GAP = 0.05
"""The gap, relative to the bound, that is assumed without a known choice."""

_GROWTH, _SHRINKING = 1.1, 0.66
"""Factors of the step after a bound that improved, and after `_PATIENCE` bounds that did not."""

_PATIENCE = 20
"""Bounds in a row without improvement after which the step shrinks."""

_NEGLIGIBLE = 1e-4
"""Step below which steps restart from `_FRACTION`."""

_STRETCHES = 16
"""Stretches of time: in each, the price of the fullest moment rises."""


class Dual(Ascent):
    """Prices on memory, messages, and the best bound of both.

    Args:
        core, view: the problem.
        prices: the first cost per byte at each moment; zero by default.

    Attributes:
        bound: the best bound so far, the core's constant included.
        best_prices: the prices of the best bound.

    Source: F. Barahona and R. Anbil, "The volume algorithm: producing primal solutions with a subgradient method",
    2000. Prices always move from the best known ones, along an average of the excess of rounded choices over the limit.
    """

    def __init__(self, core: Core, view: CoreArrays, prices: Array | None = None) -> None:
        super().__init__(Chains(view.graph, core.cost), period=1, work=4 * core.cells + len(core.usage))
        self.core, self.view = core, view
        self.best_prices = np.zeros(len(core.base))
        self._prices = self.best_prices if prices is None else prices
        self._memory_costs = np.zeros(len(core.cost))
        self._excess: Array | None = None
        self._average = np.zeros(len(core.base))
        self._improved = False
        self._failures = 0
        self._fraction = _FRACTION
        self._roundings = 0
        self._last_rounding = np.full(len(core.cost), -1)

    def _pass(self) -> float:
        core, view = self.core, self.view
        if self._excess is not None and len(self._excess):
            # By the memory of the last rounded choice.
            self._move_prices(self._excess)
        price_strategies(view, self._prices, self._memory_costs)
        self.chains.costs = core.cost + self._memory_costs
        total = self.chains.iterate()
        value = total + core.constant - self._refund
        # For the rounding of sums of many floats.
        value -= 1e-11 * (abs(value) + abs(total))
        self._improved = value > self.bound
        if self._improved:
            self.best_prices = self._prices
        return value

    def _evaluate(self, places: IntArray) -> float:
        self._roundings += 1
        self._last_rounding[self.core.offset[:-1] + places] = self._roundings
        loads = np.zeros(len(self.core.base))
        loads_of(self.view, places, loads)
        self._excess = loads - self.view.room
        return self.core.value(places) if (self._excess <= 0.0).all() else float("inf")

    @property
    def _refund(self) -> float:
        """The price of all memory within the limit, subtracted so that the Lagrangian bounds all such assignments."""
        return float(self._prices @ self.view.room)

    def floors(self) -> Array:
        """Return per strategy a bound of all assignments within the limit that use it."""
        self._prices, self._excess = self.best_prices, None
        for _ in range(_SETTLING + 1):
            self.iterate()
        floors: Array = subtract_rounding(self.chains.floors() + (self.core.constant - self._refund))
        return floors

    def round_choice(self) -> IntArray:
        """Return a choice rounded from the current messages; it may exceed the limit."""
        return self.chains.round()

    def recently_chosen(self, count: int) -> npt.NDArray[np.bool_]:
        """Return per strategy True if one of the last `count` rounded choices uses it."""
        return self._last_rounding > max(self._roundings - count, 0)

    def _move_prices(self, excess: Array) -> None:
        """Move the prices from the best ones: up at the fullest moment of each stretch that exceeds the limit, down
        where there is room.

        The step grows while bounds improve and the direction holds, and shrinks after many that did not; when it is
        negligible, it restarts.
        """
        if self._improved:
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
        # A single rounded choice jumps between strategies; the average approaches the memory of the relaxation.
        self._average = 0.5 * (self._average + excess)
        change = np.where(self.best_prices > 0, np.minimum(self._average, 0.0), 0.0)
        for stretch in np.array_split(np.arange(len(excess)), min(_STRETCHES, len(excess))):
            # Adjacent moments hold nearly the same items: raising all of them would count one excess many times.
            fullest = stretch[self._average[stretch].argmax()]
            if self._average[fullest] > 0.0 or self.best_prices[fullest] > 0.0:
                change[fullest] = self._average[fullest]
        gap = self.cost - self.bound if np.isfinite(self.cost) else _UNKNOWN_GAP * abs(self.bound)
        # Polyak's step: the remaining gap over the squared norm of the direction.
        step = self._fraction * max(gap, 1e-6 * abs(self.bound)) / max(float(change @ change), 1e-300)
        self._prices = np.maximum(self.best_prices + step * change, 0.0)
