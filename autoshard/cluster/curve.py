"""Measured seconds at some amounts, and what they say of all others."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds that some work took at rising amounts of it: bytes, operations, operations per byte.

    Attributes:
        amounts: rising, above zero.
        seconds: above zero and not falling, one for each amount.
        source: where they were measured or published; empty for measurements of one's own.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` for what is no measurement; the message says where."""
        if len(self.amounts) != len(self.seconds) or not self.amounts:
            raise ValueError(
                f"{len(self.amounts)} amounts have {len(self.seconds)} seconds: each needs one, one at least"
            )
        for index, (amount, seconds) in enumerate(zip(self.amounts, self.seconds, strict=True)):
            if not (0 < amount < float("inf") and 0 < seconds < float("inf")):
                raise ValueError(f"amount {amount:g} takes {seconds:g} s: both must be above zero, and finite")
            if index and not amount > self.amounts[index - 1]:
                raise ValueError(f"amount {amount:g} stands behind {self.amounts[index - 1]:g}: amounts must rise")
            if index and seconds < self.seconds[index - 1]:
                raise ValueError(
                    f"amount {amount:g} takes {seconds:g} s, and {self.amounts[index - 1]:g} takes "
                    f"{self.seconds[index - 1]:g} s: more never takes less"
                )

    def at(self, amount: float) -> float:
        """Seconds of any amount.

        Returns:
            amount / rate, the rate interpolated linearly between the rates at the measured amounts on either side.
            Below all measured amounts the seconds of the smallest, which are all latency; above them the rate of the
            largest. Continuous, and never falling.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": bandwidth is measured at powers of two of bytes,
        and interpolated between the two on either side.
        """
        after = bisect_right(self.amounts, amount)
        if after == 0:
            return self.seconds[0]
        low, low_seconds = self.amounts[after - 1], self.seconds[after - 1]
        if after == len(self.amounts):
            return low_seconds * amount / low
        high, high_seconds = self.amounts[after], self.seconds[after]
        low_rate, high_rate = low / low_seconds, high / high_seconds
        return amount / (low_rate + (high_rate - low_rate) * (amount - low) / (high - low))

    @property
    def rates(self) -> tuple[float, ...]:
        """Amount per second at every amount."""
        return tuple(amount / seconds for amount, seconds in zip(self.amounts, self.seconds, strict=True))

    @staticmethod
    def of_rates(amounts: Iterable[float], rates: Iterable[float], source: str = "") -> Curve:
        """A curve through published rates, in amounts per second: what benchmarks print."""
        known = tuple(amounts)
        return Curve(known, tuple(amount / rate for amount, rate in zip(known, rates, strict=True)), source)

    @staticmethod
    def slowest(curves: Sequence[Curve]) -> Curve:
        """The most seconds that any of some curves says, at every amount that one of them knows."""
        if len(curves) == 1:
            return curves[0]
        amounts = tuple(sorted({amount for curve in curves for amount in curve.amounts}))
        sources = "; ".join(dict.fromkeys(curve.source for curve in curves if curve.source))
        seconds = (max(curve.at(amount) for curve in curves) for amount in amounts)
        return Curve(amounts, tuple(itertools.accumulate(seconds, max)), sources)  # rounding may make more take less

    @staticmethod
    def through(amounts: Iterable[float], seconds: Iterable[float]) -> Curve:
        """A curve through measurements, which noise may make fall where they should rise.

        Neighbours that fall are given their mean, until nothing falls: the curve that never falls and is nearest, in
        squares of the relative error as logarithms tell it.
        """
        amounts, measured = tuple(amounts), tuple(seconds)
        levels: list[tuple[float, int]] = []  # geometric mean, and of how many
        for value in measured:
            level, count = value, 1
            while levels and levels[-1][0] > level:
                before, many = levels.pop()
                level = (level**count * before**many) ** (1 / (count + many))
                count += many
            levels.append((level, count))
        return Curve(amounts, tuple(_rising(level for level, count in levels for _ in range(count))))


def _rising(values: Iterable[float]) -> Sequence[float]:
    """The values without falls that rounding alone makes."""
    rising: list[float] = []
    for value in values:
        rising.append(max(value, rising[-1]) if rising else value)
    return rising
