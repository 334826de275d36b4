"""A descent from any choice to a good one within the limit, with weights on memory that adapt."""

from __future__ import annotations

from math import inf

import numpy as np

from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.flat.dual import loads_of, price_strategies
from autoshard.solver.flat.neighbours import conditional_costs, search_forests
from autoshard.solver.flat.random_numbers import random_state
from autoshard.solver.problem import Array, IntArray
from autoshard.solver.solver_budget import Budget

_FORESTS = 400
"""Neighbourhoods between checks of the budget."""

_LARGEST = 300
"""Most nodes of a neighbourhood."""

_MOST = 1 << 60
"""Most table entries that the solve of a neighbourhood may read: effectively no limit."""

_FORBIDDEN = 4.0
"""Cost of a forbidden pair, in multiples of a known cost: finite, since inf - inf would be NaN."""

_HEAVIER = 1.6
"""Growth of the weight of a moment while it exceeds the limit."""


class Descent:
    """A choice, and its improvement.

    Args:
        core: the problem.
        view: its arrays.
        scale: the order of magnitude of a good cost; a forbidden pair costs a multiple of it.
        seed: of the random numbers.
        most: table entries that the solve of a neighbourhood may read.
    """

    def __init__(self, core: Core, view: CoreArrays, scale: float, seed: int, most: int = _MOST) -> None:
        self.core = core
        # `move_node` subtracts old costs from sums, and inf - inf would be NaN.
        self.view = view._replace(table=np.minimum(view.table, _FORBIDDEN * max(abs(scale), 1e-300)))
        self.work = 0
        self._most = most
        self.best: IntArray | None = None
        self.cost = float("inf")
        self._random_state = random_state(seed)
        self._conditional_costs = np.zeros(len(core.cost))
        self._memory_costs = np.zeros(len(core.cost))
        self._loads = np.zeros(len(core.base))
        self._state = np.array([1.0, 0.0])
        self._prices = np.zeros(len(core.base))
        self._weights = np.zeros(len(core.base))

    def begin(self, places: IntArray, prices: Array) -> None:
        """Restart from a choice, with prices on memory; the best choice so far is kept."""
        self.places = places.copy()
        self._prices = prices
        # A penalty of at least the highest price, so that exceeding the limit never pays at once.
        level = float(prices.max(initial=0.0)) or self._initial_price()
        self._weights = np.full(len(prices), level)
        self._state[0] = 1.0
        price_strategies(self.view, prices, self._memory_costs)
        loads_of(self.view, self.places, self._loads)
        self._keep_if_best()

    def _initial_price(self) -> float:
        """Return a first price where none is known: all costs over all bytes of the limit."""
        spread = float(np.abs(self.core.cost).max(initial=0.0)) or 1.0
        return spread / max(abs(self.core.limit), 1.0) if np.isfinite(self.core.limit) else 0.0

    @property
    def is_within_limit(self) -> bool:
        """True if the current choice is within the limit."""
        return bool((self._loads <= self.view.room).all())

    def run(self, temperature: float = 0.0, forests: int = _FORESTS) -> bool:
        """Solve some neighbourhoods; return True if the best choice improved."""
        if not len(self.places):
            return self._keep_if_best()  # without nodes there is one choice
        # Recomputed every time, since rounding of differences accumulates over many moves.
        conditional_costs(self.view, self.places, self._conditional_costs)
        loads_of(self.view, self.places, self._loads)
        before = self._state[1]
        over = search_forests(
            self.view,
            self.places,
            self._loads,
            self._memory_costs,
            self._weights,
            self._conditional_costs,
            forests,
            _LARGEST,
            self._most,
            self._random_state,
            self._state,
            temperature,
        )
        self.work += int(self._state[1] - before) + 2 * self.core.cells // 10 + len(self.core.base)
        if over > 0.0:
            self._raise_weights()
        return self._keep_if_best()

    def search(self, patience: int, budget: Budget, *, work: float = inf, forests: int = _FORESTS) -> None:
        """Solve neighbourhoods until `patience` runs in a row improve nothing, or `work` is done."""
        end, failures = self.work + work, 0
        while failures < patience and self.work < end and not budget.is_over:
            before = self.work
            failures = 0 if self.run(forests=forests) else failures + 1
            budget.spend(self.work - before)

    def _raise_weights(self) -> None:
        """Raise the weights of moments above the limit, and add them to the prices."""
        above = self._loads > self.view.room
        self._weights[above] *= _HEAVIER
        price_strategies(self.view, self._prices + np.where(above, self._weights, 0.0), self._memory_costs)
        self._state[0] = 1.0

    def _keep_if_best(self) -> bool:
        if not (self._loads <= self.view.room).all():
            return False
        cost = self.core.value(self.places)
        if cost < self.cost:
            self.cost, self.best = cost, self.places.copy()
            return True
        return False
