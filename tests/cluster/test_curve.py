"""What measurements say of amounts that were not measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster.curve import Curve

SECONDS = st.floats(1e-2, 10.0)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    count = draw(st.integers(1, 10))
    return Curve.through((2.0**power for power in range(3, 3 + count)), [draw(SECONDS) for _ in range(count)])


def test_rates_are_interpolated_between_powers_of_two() -> None:
    curve = Curve((4.0, 8.0), (2.0, 2.5))  # rates 2 and 3.2
    assert curve.at(6) == pytest.approx(6 / 2.6)
    assert curve.at(5) == pytest.approx(5 / 2.3)


def test_outside_the_nearest_counts() -> None:
    curve = Curve((4.0, 8.0), (2.0, 2.5))
    assert curve.at(0) == curve.at(1) == 2.0  # latency alone
    assert curve.at(80) == pytest.approx(25.0)  # the rate of the largest


@given(curves(), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_never_takes_less(curve: Curve, amount: float, more: float) -> None:
    assert curve.at(amount) <= curve.at(amount + more) * (1 + 1e-9)


@given(curves())
def test_it_is_continuous_at_measured_amounts(curve: Curve) -> None:
    for amount, seconds in zip(curve.amounts, curve.seconds, strict=True):
        assert curve.at(amount) == pytest.approx(seconds)
        assert curve.at(amount * (1 - 1e-9)) == pytest.approx(seconds, rel=1e-6)
        assert curve.at(amount * (1 + 1e-9)) == pytest.approx(seconds, rel=1e-6)


@given(st.lists(SECONDS, min_size=1, max_size=10))
def test_a_curve_through_noise_rises_and_keeps_what_rises(seconds: list[float]) -> None:
    amounts = range(1, 1 + len(seconds))
    curve = Curve.through(amounts, seconds)
    assert all(low <= high for low, high in itertools.pairwise(curve.seconds))
    assert min(seconds) * (1 - 1e-9) <= curve.seconds[0]
    assert curve.seconds[-1] <= max(seconds) * (1 + 1e-9)
    rising = sorted(seconds)
    assert Curve.through(amounts, rising).seconds == pytest.approx(tuple(rising))


def test_neighbours_that_fall_share_their_mean() -> None:
    assert Curve.through((1, 2, 4), (1.0, 9.0, 4.0)).seconds == pytest.approx((1.0, 6.0, 6.0))


@pytest.mark.parametrize(
    ("amounts", "seconds", "message"),
    [
        ((), (), "0 amounts have 0 seconds"),
        ((1.0, 2.0), (1.0,), "2 amounts have 1 seconds"),
        ((0.0,), (1.0,), "amount 0 takes 1 s: both must be above zero"),
        ((1.0,), (-1.0,), "takes -1 s: both must be above zero"),
        ((2.0, 1.0), (1.0, 1.0), "amounts must rise"),
        ((1.0, 2.0), (2.0, 1.0), "more never takes less"),
    ],
)
def test_what_is_no_measurement_is_refused(amounts: tuple, seconds: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(amounts, seconds)


def test_rates_are_amounts_by_seconds() -> None:
    curve = Curve.of_rates((10.0, 100.0), (5.0, 20.0), "a table")
    assert curve.seconds == (2.0, 5.0)
    assert curve.rates == (5.0, 20.0)
    assert curve.source == "a table"
    assert curve == Curve((10.0, 100.0), (2.0, 5.0))


def test_the_slowest_of_curves_is_slower_than_each() -> None:
    first, second = Curve((1.0, 10.0), (2.0, 4.0)), Curve((3.0, 30.0), (1.0, 90.0))
    slowest = Curve.slowest([first, second])
    assert slowest.amounts == (1.0, 3.0, 10.0, 30.0)
    for amount in slowest.amounts:
        assert slowest.at(amount) == max(first.at(amount), second.at(amount))
