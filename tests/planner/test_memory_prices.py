"""Prices of memory are those at which the best mix of some plans within a limit is the cheapest of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.planner.memory_prices import mix_prices


def test_a_byte_costs_what_two_plans_trade_for_it() -> None:
    # Half of each plan makes the limit: two seconds buy eight bytes, at the moment at which they differ.
    prices, best = mix_prices([1.0, 3.0], [np.array([12.0, 4.0]), np.array([4.0, 4.0])], 8.0, 100.0)
    assert prices == pytest.approx([0.25, 0.0])
    assert best == pytest.approx(1.0 + 0.25 * 12.0)


def test_memory_costs_nothing_where_the_fastest_plan_fits() -> None:
    prices, best = mix_prices([1.0, 3.0], [np.array([7.0]), np.array([4.0])], 8.0, 100.0)
    assert not prices.any()
    assert best == pytest.approx(1.0)


def test_memory_costs_nothing_where_no_plan_comes_near_the_limit() -> None:
    prices, best = mix_prices([3.0, 1.0], [np.array([1.0, 2.0]), np.array([2.0, 1.0])], 8.0, 100.0)
    assert not prices.any()
    assert best == 1.0


def test_memory_counts_as_much_as_it_may_where_no_mix_fits() -> None:
    prices, _ = mix_prices([1.0, 3.0], [np.array([20.0, 9.0]), np.array([16.0, 16.0])], 8.0, 100.0)
    assert prices.sum() * 8.0 == pytest.approx(100.0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_plan_costs_less_than_the_mix_at_its_prices(data: Any) -> None:
    count, moments = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    costs = data.draw(st.lists(st.floats(0.5, 4.0), min_size=count, max_size=count))
    held = [
        np.array(data.draw(st.lists(st.integers(1, 20), min_size=moments, max_size=moments)), dtype=float)
        for _ in range(count)
    ]
    limit = float(data.draw(st.integers(2, 20)))
    prices, best = mix_prices(costs, held, limit, 50.0)
    assert (prices >= 0.0).all()
    priced = [cost + float(prices @ bytes) for cost, bytes in zip(costs, held, strict=True)]
    assert min(priced) == pytest.approx(best, rel=1e-6)
    # A plan that fits bounds the mix from above.
    fitting = [cost for cost, bytes in zip(costs, held, strict=True) if bytes.max() <= limit]
    if fitting:
        assert best - prices.sum() * limit <= min(fitting) * (1 + 1e-6)
