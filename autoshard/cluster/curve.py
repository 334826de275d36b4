"""Measured seconds at some amounts of work, interpolated for all others."""

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
        source: of published figures; empty for measurements by `autoshard.calibrate`.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for values that no measurement gives; the message says where."""
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
        """Return the seconds of any amount.

        Returns:
            amount / rate, the rate interpolated linearly between the rates at the measured amounts on either side.
            Below all measured amounts the seconds of the smallest; above them the rate of the largest. Continuous, and
            never falling.

        Source: TensorOpt 3.2, "Improving cost estimation accuracy": bandwidth is measured at powers of two of bytes,
        and interpolated between the two on either side.
        """
        after = bisect_right(self.amounts, amount)
        if after == 0:
            # Nearly all latency.
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
        """Return the curve through published rates, in amounts per second, which benchmarks print."""
        amounts = tuple(amounts)
        return Curve(amounts, tuple(amount / rate for amount, rate in zip(amounts, rates, strict=True)), source)

    @staticmethod
    def slowest(curves: Sequence[Curve]) -> Curve:
        """Return the most seconds of any curve, at every amount that one of them has."""
        if len(curves) == 1:
            return curves[0]
        amounts = tuple(sorted({amount for curve in curves for amount in curve.amounts}))
        sources = "; ".join(dict.fromkeys(curve.source for curve in curves if curve.source))
        seconds = (max(curve.at(amount) for curve in curves) for amount in amounts)
        # Rounding may make more take less.
        return Curve(amounts, tuple(itertools.accumulate(seconds, max)), sources)

    @staticmethod
    def through(amounts: Iterable[float], seconds: Iterable[float]) -> Curve:
        """Return the curve that never falls and is nearest to measurements, which noise may make fall.

        Neighbours that fall are given their mean, until nothing falls (the pool-adjacent-violators algorithm). The
        distance is the sum of squared differences of logarithms, that is of relative errors.
        """
        # Geometric mean of a run of measurements, and their number.
        levels: list[tuple[float, int]] = []
        for level in seconds:
            count = 1
            while levels and levels[-1][0] > level:
                before, many = levels.pop()
                level = (level**count * before**many) ** (1 / (count + many))
                count += many
            levels.append((level, count))
        means = (level for level, count in levels for _ in range(count))
        # Rounding may make neighbours fall.
        return Curve(tuple(amounts), tuple(itertools.accumulate(means, max)))
