"""A lower bound under a memory limit: prices on memory over time, and message passing at these prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import numpy.typing as npt

from autoshard.solver.flat.core import Core
from autoshard.solver.flat.core_arrays import CoreArrays
from autoshard.solver.flat.flat_trws import loads_of, pass_messages, price_strategies, round_in_order
from autoshard.solver.problem import Array, IntArray

_SETTLING = 5
"""Passes at the best prices before floors are read."""

_FRACTION = 0.05
"""The first step, as a share of the one that would close the gap if the bound were linear in the prices."""

_UNKNOWN_GAP = 0.05
"""What the gap is taken for where no choice is known, relative to the bound."""

_GROWTH, _SHRINKING = 1.1, 0.66
"""By how much the share grows after a bound that improved, and shrinks after many that did not."""

_PATIENCE = 20
"""How many those are."""

_NEGLIGIBLE = 1e-4
"""Share at which steps become so small that the next one is a large one again."""

_STRETCHES = 16
"""Stretches of time: in each, the fullest moment is the one whose price rises."""


@dataclass
class Dual:
    """Prices, messages, and the best bound that they gave.

    Attributes:
        core, view: the problem.
        prices: cost per byte at each moment, now.
        value: the best bound so far, the core's constant included.
        best_prices: those of the best bound.
        upper: cost of a choice known to keep the limit.
        best: the best rounded choice that keeps the limit; None while there is none.

    Source: V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006. The prices move
    as in F. Barahona and R. Anbil, "The volume algorithm: producing primal solutions with a subgradient method", 2000:
    always from the best ones known, along an average of what rounded choices use above the limit.
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
        """Passes there and back; with `move`, prices follow what a rounded choice uses.

        Args:
            rounds: passes there and back.
            move: whether prices move, or only messages.
            deadline: `time.monotonic()` seconds after which no further pass starts.
        """
        core, view = self.core, self.view
        loads = np.zeros(len(core.base))
        for _ in range(rounds):
            if monotonic() > deadline or self.value >= self.upper:
                return
            known = self.value
            improved = self._pass() > known
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
        """One pass there and back at the prices as they stand; returns the bound."""
        core, view = self.core, self.view
        price_strategies(view, self.prices, self._memory_costs)
        unary = core.cost + self._memory_costs
        pass_messages(view, unary, self._messages, False, self._widest, self._beliefs)
        self._forward = np.minimum.reduceat(self._beliefs, core.offset[:-1])
        total = pass_messages(view, unary, self._messages, True, self._widest, self._beliefs)
        value = total + core.constant - float(self.prices @ view.room)
        # Sums of many floats.
        value -= 1e-11 * (abs(value) + abs(total))
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
        least = np.minimum.reduceat(self._beliefs, core.offset[:-1])
        ahead = np.bincount(core.ends.min(1, initial=core.nodes), minlength=core.nodes)
        behind = np.bincount(core.ends.ravel(), minlength=core.nodes) - ahead
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

    def round_choice(self) -> IntArray:
        """A choice rounded from the messages as they stand; it may pass the limit."""
        places = np.zeros(self.core.nodes, dtype=np.int64)
        round_in_order(self.view, self.core.cost + self._memory_costs, self._messages, self._widest, places)
        return places

    def recently_chosen(self, passes: int) -> npt.NDArray[np.bool_]:
        """Per strategy, whether a choice rounded in one of the last passes used it."""
        return self._last_pass > max(self._passes - passes, 0)

    def _move_prices(self, excess: Array, improved: bool) -> None:
        """New prices, from the best ones: up at the fullest moment of each stretch that passes the limit, down where
        there is room.

        The step grows while bounds improve and the direction holds, and shrinks after many that did not; when it has
        become negligible, it starts anew.
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
        self._average = 0.5 * (self._average + excess)
        change = np.where(self.best_prices > 0, np.minimum(self._average, 0.0), 0.0)
        for stretch in np.array_split(np.arange(len(excess)), min(_STRETCHES, len(excess))):
            fullest = stretch[self._average[stretch].argmax()]
            if self._average[fullest] > 0.0 or self.best_prices[fullest] > 0.0:
                change[fullest] = self._average[fullest]
        gap = self.upper - self.value if np.isfinite(self.upper) else _UNKNOWN_GAP * abs(self.value)
        step = self._fraction * max(gap, 1e-6 * abs(self.value)) / max(float(change @ change), 1e-300)
        self.prices = np.maximum(self.best_prices + step * change, 0.0)
