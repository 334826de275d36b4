"""From the fastest plan to the leanest: a fixed row of plans in between, and the first of them that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Plan = TypeVar("Plan")
Measure = Callable[[Plan], tuple[float, int]]


def first_that_fits(
    fastest: Plan,
    leanest: Plan,
    rungs: int,
    make: Callable[[int], Plan],
    measure: Measure[Plan],
    limit: int,
    alike: float = 0.0,
    begin: int | None = None,
) -> Plan:
    """The fastest plan within a limit among those on a ladder, of which few are made.

    Plans are made at middles of intervals, and what is made between two plans depends on these two alone, not on the
    limit. One that does not lie between them, both in seconds and in bytes, is left out. What is left is one row of
    plans for all limits, in which bytes fall and seconds rise, whatever `make` returns; bisection finds the first that
    fits. It ends where the two plans are about as fast as each other, which depends on these two alone as well. A plan
    that was left out is taken where it fits and is faster: no limit gives a slower plan than the row has for it.

    Args:
        fastest: a plan that does not fit.
        leanest: one that does.
        rungs: plans that can be made between these.
        make: the plan at a rung, from 1, next to the fastest, to `rungs`, next to the leanest.
        measure: seconds and bytes of a plan.
        limit: bytes that a plan may hold.
        alike: part of a plan's seconds by which two may differ and no plan between them is looked for.
        begin: the rung that is looked at first: one that is good, so that worse ones near it are left out; by default
            the middle.
    """
    low, high, left, right = fastest, leanest, 0, rungs + 1
    fitting = [leanest]
    while right - left > 1 and measure(high)[0] > (1.0 + alike) * measure(low)[0]:
        middle = (left + right) // 2 if begin is None or not left < begin < right else begin
        plan = make(middle)
        seconds, held = measure(plan)
        if held <= limit:
            fitting.append(plan)
        if seconds < measure(low)[0] or held >= measure(low)[1]:
            left = middle
        elif seconds > measure(high)[0] or held <= measure(high)[1]:
            right = middle
        elif held <= limit:
            high, right = plan, middle
        else:
            low, left = plan, middle
    return min((high, *fitting), key=lambda one: measure(one)[0])
