"""A lower bound under a memory limit: prices on memory over time, and message passing at these prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from autoshard.solver.flat.core import Core, starts
from autoshard.solver.flat.messages import loads_of, price_strategies, round_in_order, sweep
from autoshard.solver.flat.view import View
from autoshard.solver.problem import Array, IntArray

_SETTLING = 5
"""Passes at the best prices before floors are read."""

_PROBE = 1.5
"""Growth of the step until the bound falls for the first time."""

_STRETCHES = 256
"""Stretches of time: in each, the fullest moment is the one whose price rises."""


@dataclass
class Dual:
    """Prices, messages, and the best bound that they gave.

    Attributes:
        core, view: the problem.
        prices: cost per byte at each moment, now.
        value: the best bound so far, the core's constant included.
        best_prices: those of the best bound.
        step: by how much prices move, per byte above the limit.
        upper: cost of a choice known to keep the limit.
        best: the best rounded choice that keeps the limit; None while there is none.

    Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006; the prices follow
    subgradients, with steps bounded as B. T. Polyak does ("Minimization of unsmooth functionals", 1969).
    """

    core: Core
    view: View
    prices: Array = field(init=False)
    value: float = float("-inf")
    best_prices: Array = field(init=False)
    step: float = 0.0
    upper: float = float("inf")
    best: IntArray | None = None

    def __post_init__(self) -> None:
        core = self.core
        self.prices = np.zeros(len(core.base))
        self.best_prices = self.prices.copy()
        owner = core.ends.ravel()
        lengths = core.size[owner]
        self._inbox = starts(lengths)[:-1]
        self._messages = np.zeros(int(lengths.sum()))
        low = core.ends.min(1, initial=core.nodes)
        self._ahead = np.bincount(low, minlength=core.nodes)
        self._beliefs = np.zeros(len(core.cost))
        self._priced = np.zeros(len(core.cost))
        self._average = np.zeros(len(core.base))
        self._last = float("-inf")
        self._patience = 10
        self._probing = True

    def ascend(self, rounds: int, *, move: bool = True, deadline: float = float("inf")) -> None:
        """Passes there and back; with `move`, prices follow what a rounded choice uses.

        Args:
            rounds: passes there and back.
            move: whether prices move, or only messages.
            deadline: `time.monotonic()` seconds after which no further pass starts.
        """
        core, view = self.core, self.view
        loads = np.zeros(len(core.base))
        for _ in range(rounds):
            if monotonic() > deadline:
                return
            value = self._pass()
            places = self.rounded()
            loads_of(view, places, loads)
            if (loads <= view.room).all():
                cost = core.value(places)
                if cost < self.upper:
                    self.upper, self.best = cost, places
            if move and len(loads):
                self._move(loads - view.room, value)

    def _pass(self) -> float:
        """One pass there and back at the prices as they stand; returns the bound."""
        core, view = self.core, self.view
        price_strategies(view, self.prices, self._priced)
        unary = core.cost + self._priced
        sweep(view, unary, self._messages, self._inbox, self._ahead, False, self._beliefs)
        self._forward = np.minimum.reduceat(self._beliefs, view.offset)
        total = sweep(view, unary, self._messages, self._inbox, self._ahead, True, self._beliefs)
        value = total + core.constant - float(self.prices @ view.room)
        value -= 1e-11 * (abs(value) + abs(total))  # sums of many floats
        if value > self.value:
            self.value, self.best_prices = value, self.prices.copy()
        return value

    def floors(self) -> Array:
        """Per strategy: what every assignment within the limit that uses it costs at least.

        After a pass back chains' optima stand at their first nodes, and forward minima where chains ended before.
        See `bound._Chains.floors`, of which this is the twin on flat arrays.
        """
        core, view = self.core, self.view
        self.prices = self.best_prices.copy()
        value = max(self._pass() for _ in range(_SETTLING))
        value = self._pass()
        least = np.minimum.reduceat(self._beliefs, view.offset)
        degree = np.diff(view.first_half)
        ahead, behind = self._ahead, degree - self._ahead
        share = 1.0 / np.maximum(np.maximum(ahead, behind), 1)
        ends_after, ends_before = 1.0 - ahead * share, 1.0 - behind * share
        ended = np.cumsum(ends_after * self._forward) - ends_after * self._forward
        begun = ends_before * least
        begun = np.cumsum(begun[::-1])[::-1] - begun
        crossing = np.zeros(core.nodes + 1)
        if len(core.ends):
            earlier, later = core.ends.min(1), core.ends.max(1)
            carried = share[later] * least[later]
            np.add.at(crossing, earlier + 1, carried)
            np.subtract.at(crossing, later, carried)
        passed = ended + begun + np.cumsum(crossing)[:-1]
        constant = core.constant - float(self.prices @ view.room)
        floors: Array = np.maximum(self._beliefs + np.repeat(passed, core.size) + constant, value)
        # Sums of many floats: what rounding may have added is taken off.
        return floors - 1e-11 * np.abs(floors)

    def rounded(self) -> IntArray:
        """A choice rounded from the messages as they stand; it may pass the limit."""
        places = np.zeros(self.core.nodes, dtype=np.int64)
        round_in_order(self.view, self.core.cost + self._priced, self._messages, self._inbox, places)
        return places

    def _move(self, excess: Array, value: float) -> None:
        """Prices rise at the fullest moment of each stretch that passes the limit, and fall where there is room.

        Steps grow while the bound does, fast until it falls for the first time, and shrink where it falls; a bound
        that fell far below the best one sends the prices back to where that was.
        """
        known = self.upper - self.value if np.isfinite(self.upper) else 0.2 * abs(self.value)
        self._patience -= 1
        if value < self.value - max(2.0 * known, 0.02 * abs(self.value)) and self._patience < 0:
            # Too far: from the best prices on, more carefully.
            self.prices = self.best_prices.copy()
            self.step *= 0.4
            self._patience = 10
            self._average[:] = 0.0
            self._last = float("-inf")
            return
        self._average = 0.6 * self._average + 0.4 * excess
        change = np.where(self.prices > 0, np.minimum(self._average, 0.0), 0.0)
        for stretch in np.array_split(np.arange(len(excess)), min(_STRETCHES, len(excess))):
            fullest = stretch[self._average[stretch].argmax()]
            change[fullest] = self._average[fullest]
        length = max(float(change @ change), 1e-300)
        if not self.step:
            self.step = 0.01 * max(abs(value), 1.0) / length
        else:
            if self._probing and value < self._last:
                self._probing = False
                self.prices = self.best_prices.copy()
                self.step *= 0.4
                self._last = float("-inf")
                return
            self.step *= (_PROBE if self._probing else 1.1) if value > self._last else 0.85
        if np.isfinite(self.upper):
            self.step = min(self.step, 4.0 * max(self.upper - value, 1e-6 * abs(value)) / length)
        self._last = value
        self.prices = np.maximum(self.prices + self.step * change, 0.0)
