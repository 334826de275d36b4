"""A problem at loose prices, answered: messages look at all options, few of them are near, and these are taught.

Where repeated layers are known, all that is looked for is one choice for equal ones; what is proved is proved for the
whole depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

import numpy as np

from autoshard.planner.lessons import Lessons
from autoshard.planner.problem import Hiding
from autoshard.planner.solving import (
    CLOSE,
    ITERATIONS,
    MENDING,
    Answer,
    Search,
    answer_of,
    better,
    in_segments,
    passes,
    tied_messages,
)
from autoshard.planner.tiling import Tiling
from autoshard.reshard.path import Resharder
from autoshard.solver import Problem
from autoshard.solver.problem import IntArray
from autoshard.solver.warm import Messages, among, narrowed

_LOOKS = 4
"""Times that all options are looked at, at most."""

_LESSONS = 40
"""Times that prices are learned for some options, at most."""

_LEARNED = 1e-4
"""Relative distance of the best answer to what bounds it at which no more is learned."""

_SEEN = 2e-3
"""The same of the first look, at prices that are not exact yet: what is learned next changes them by more."""

_PROPOSED = 2e-2
"""The same of a proposal: a few passes do not bound it well."""

_LAID = 3
"""Passes there and back at full depth, at most, before options are left out that are proved to be of no use."""

_ROUNDING = 1e-9
"""Relative slack within which an option might be as good as a known assignment."""

_GLANCE = 5
"""Passes there and back after which a proposal is looked for among the options that are near the best."""

_NEAR = 3e-3
"""Part of the bound by which an option may raise it to be near, if all layers choose it; there are some ten of them on
three axes. What is chosen in one layer alone may raise it by as much less as there are layers."""

_STITCHES = 4
"""Times that segments are, where what messages give is not close."""


def taught(
    lessons: Lessons, resharder: Resharder, tiling: Tiling | None, search: Search, hiding: Hiding | None = None
) -> tuple[Answer, Lessons]:
    """The best assignment of a problem at loose prices by exact ones, and what was learned on the way.

    Args:
        lessons: the problem, at prices that are not above the exact ones.
        resharder: the exact ones.
        tiling: which variables repeat others; None where nothing does.
        search: limits.
        hiding: what collectives of a kind count; all their seconds by default. The answer is then a proposal: tied
            layers are enough, if they come close to what bounds them, and nothing is proved.

    Returns:
        The assignment, with its cost at exact prices and a bound of all; and the problem with the prices learned.
    """
    course = _Course(lessons, resharder, tiling, search, hiding)
    return course.run(), course.lessons


class _Course:
    """One problem on its way from loose prices to an answer: `best` is that so far, `lessons` what was learned."""

    def __init__(
        self, lessons: Lessons, resharder: Resharder, tiling: Tiling | None, search: Search, hiding: Hiding | None
    ) -> None:
        self.lessons = lessons
        self.resharder = resharder
        self.tiling = tiling
        self.search = search
        self.hiding = hiding
        self.order = lessons.built.places
        self._asked: tuple[Lessons, Problem] | None = None  # at the prices learned last
        self.best = Answer((), float("inf"), -np.inf, "messages", "unknown")

    def run(self) -> Answer:
        enough = _LEARNED if self.hiding is None else _PROPOSED
        around = None if self.hiding is None else self.lessons.around(self.hiding)
        if around is not None:
            self._learn(around)
            return self.best
        for _ in range(_LOOKS):
            near, bound = self._near()
            if self._is_within(enough, bound) or self._over():
                break
            self._learn(near)
            if self._is_within(enough, bound) or self._over():
                break
        if self.hiding is not None:
            return self.best
        if self.tiling is not None and not self._over():
            self._prove()
        for _ in range(_STITCHES):
            if self.best.gap <= CLOSE or self._over():
                break
            stitched = in_segments(self._problem(), self.order, self.tiling, self.search)
            if not self._examine(stitched, stitched.assignment):
                break
        return self.best

    def _over(self) -> bool:
        return self.best.interrupted or monotonic() > self.search.deadline

    def _is_within(self, part: float, bound: float) -> bool:
        """Whether the best answer is within this part of a bound."""
        return self.best.cost <= bound + part * abs(bound)

    def _problem(self) -> Problem:
        if self._asked is None or self._asked[0].built is not self.lessons.built:
            self._asked = self.lessons, self.lessons.asked(self.hiding).problem
        return self._asked[1]

    def _near(self) -> tuple[list[IntArray], float]:
        """The options of tied layers that are near the best, by passes over all, and what bounds such layers."""
        messages = tied_messages(self._problem(), self.order, self.tiling)
        if self.lessons.messages is not None:
            messages.start_from(*self.lessons.messages)
        known, looked = self.best.cost, ITERATIONS if self.hiding is None else _GLANCE
        close = _LEARNED if np.isfinite(known) else _SEEN
        relaxed, interrupted = passes(messages, looked, self.search, known, close)
        near = messages.near(_NEAR * abs(relaxed.bound) * self._repeated())
        self.lessons = self.lessons.looked(self.hiding, near, messages)
        if self.tiling is None and self.hiding is None:
            self.best = better(self.best, replace(answer_of(relaxed, interrupted), assignment=(), cost=float("inf")))
        if interrupted or np.isfinite(known) or self._over():
            found = replace(answer_of(relaxed, interrupted), lower_bound=-np.inf)
            self._examine(found, self._spread(relaxed.assignment))
        return near, relaxed.bound

    def _repeated(self) -> np.ndarray:
        """Per variable of tied layers, the part of the layers that choose as it does, of the most that do so."""
        if self.tiling is None:
            return np.ones(len(self.order))
        counts = Counter(self.tiling.follows)
        repeated = np.array([counts[place] for place in range(len(self.tiling.leaders))], dtype=float)
        return repeated / repeated.max()

    def _spread(self, assignment: Sequence[int]) -> tuple[int, ...]:
        return self.tiling.spread(assignment) if self.tiling is not None and assignment else tuple(assignment)

    def _learn(self, near: list[IntArray]) -> None:
        """Answers of some options of tied layers, until all that the last one counts on is exact."""
        assert self.lessons.messages is not None
        warm = self.lessons.messages
        for attempt in range(_LESSONS):
            messages = tied_messages(self._problem(), self.order, self.tiling, near)
            messages.start_from(*(warm if attempt else among(messages.problem, *warm, near)))
            relaxed, interrupted = passes(messages, ITERATIONS, self.search)
            warm, found = (messages.along, messages.against), answer_of(relaxed, interrupted)
            if found.gap > CLOSE and not interrupted:
                leaders = self.order if self.tiling is None else [self.order[leader] for leader in self.tiling.leaders]
                found = better(found, in_segments(messages.problem, leaders, None, self.search))
            chosen = [int(options[place]) for options, place in zip(near, found.assignment, strict=False)]
            news = self._examine(replace(found, lower_bound=-np.inf), self._spread(chosen))
            if not news or self._over() or self._is_within(_LEARNED, relaxed.bound):
                break

    def _prove(self) -> None:
        """Bounds the whole problem, all options of untied layers, from what was told in tied ones."""
        assert self.lessons.messages is not None
        assert self.tiling is not None
        whole = Messages(self._problem(), self.order)
        whole.start_from(*self.tiling.messages(whole.problem, *self.lessons.messages))
        found = self._mended(whole, self.tiling.follows)
        self._examine(found, found.assignment)

    def _mended(self, whole: Messages, follows: Sequence[int]) -> Answer:
        """Some passes, then, where these are not close, more among the options that they leave open below a known cost.

        What is left out costs at least that, so that no assignment costs less than it and what bounds the others.
        Layers keep the same options, to go on sharing their tables.
        """
        upper, search = self.best.cost, self.search
        relaxed, interrupted = passes(whole, _LAID, search, upper, CLOSE)
        slack = upper - relaxed.bound + _ROUNDING * abs(upper)
        if interrupted or not np.isfinite(slack) or slack <= CLOSE * abs(upper):
            return answer_of(relaxed, interrupted)
        whole.run(1, upper=upper)
        open_: dict[int, IntArray] = {}
        for leader, own in zip(follows, whole.near(slack), strict=True):
            open_[leader] = np.union1d(open_[leader], own) if leader in open_ else own
        kept = [open_[leader] for leader in follows]
        rest = Messages(narrowed(whole.problem, kept), self.order)
        rest.start_from(*among(rest.problem, whole.along, whole.against, kept))
        relaxed, interrupted = passes(rest, MENDING, search, upper)
        assignment = tuple(int(some[place]) for some, place in zip(kept, relaxed.assignment, strict=False))
        return replace(answer_of(relaxed, interrupted), assignment=assignment, lower_bound=min(relaxed.bound, upper))

    def _examine(self, found: Answer, assignment: tuple[int, ...]) -> bool:
        """Takes an answer if it is better by the exact prices of what it uses; says whether these were news."""
        after = self.lessons.after(assignment, self.resharder) if assignment else None
        self.lessons = after or self.lessons
        cost = self._problem().cost(assignment) if assignment else float("inf")
        self.best = better(self.best, replace(found, assignment=assignment if np.isfinite(cost) else (), cost=cost))
        return after is not None
