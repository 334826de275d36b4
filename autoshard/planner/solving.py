"""One problem of the planner, solved: by messages where it is large, by the solver's other ways where a gap is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from autoshard.planner.lessons import Lessons
from autoshard.planner.problem import BuiltProblem, Hiding
from autoshard.planner.tiling import Tiling
from autoshard.reshard.path import Resharder
from autoshard.solver import Problem, solve
from autoshard.solver.hierarchy import solve_in_segments
from autoshard.solver.problem import IntArray
from autoshard.solver.warm import Messages, Relaxed, narrowed

Report = Callable[[str, float, float], None]
"""Told of what is being done, the least cost known, and the bound."""

_LARGE = 200_000
"""Entries of all edge tables from which messages are tried first: smaller problems are solved exactly at once."""

_ITERATIONS = 120
"""Passes there and back, at most."""

_MENDING = 40
"""Passes there and back at full depth, at most, that mend messages found on a few layers."""

_MENDING_PRICED = 11
"""The same where memory has a price: what more of them find is no better, and bounds are not wanted."""

_PROVED = 1e-6
"""Relative gap at which nothing is left to look for: prices are not known better."""

_GOOD = 1e-4
"""Relative gap at which it ends where nothing is to be proved."""

_PRICED = 2e-2
"""The same where memory has a price: what the limit is kept by is chosen among plans at many prices."""

_LESSONS = 40
"""Times that prices are learned, at most."""

_LAID = 3
"""The same before options are left out that are proved to be of no use."""

_ROUNDING = 1e-9
"""Relative slack within which an option might be as good as a known assignment."""

_GLANCE = 5
"""Passes there and back after which a proposal is looked for among the options that are near the best."""

_NEAR = 1e-3
"""Part of the bound by which an option may raise it to be near: there are some tens of them on three axes."""

_STITCHES = 4
"""Times that segments are, where what messages give is not close."""

CLOSE = 5e-3
"""Relative gap at which a plan of tied layers stands; where it is larger, every layer is looked at by itself."""


@dataclass(frozen=True, slots=True)
class Search:
    """How one problem is to be solved.

    Attributes:
        method: one of the solver's.
        deadline: `time.monotonic()` seconds.
        proof: whether the bound is wanted; else a good assignment is enough.
        priced: whether memory has a price.
        fast: whether an assignment of message passing or, where that leaves a gap, of segments is good enough.
        proposal: whether it is to be judged by its timeline, and tied layers are good enough.
        work_limit: of the solver, in its units; None for none.
        report: told how it goes.
    """

    method: str
    deadline: float
    proof: bool = True
    priced: bool = False
    fast: bool = False
    proposal: bool = False
    work_limit: int | None = None
    report: Report | None = None

    @property
    def close(self) -> float:
        """Relative gap at which the search ends."""
        if self.priced:
            return _PRICED
        return _PROVED if self.proof else _GOOD

    def told(self, phase: str, cost: float, bound: float) -> None:
        if self.report is not None:
            self.report(phase, cost, bound)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        assignment: an option per variable; empty where none is known.
        cost: of the assignment.
        lower_bound: no assignment costs less.
        method: what found it.
        status: as the solver's.
        interrupted: whether somebody stopped the search.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    method: str
    status: str
    interrupted: bool = False

    @property
    def gap(self) -> float:
        return (self.cost - self.lower_bound) / max(abs(self.cost), 1e-300) if self.assignment else float("inf")


def answered(built: BuiltProblem, tiling: Tiling | None, search: Search) -> Answer:
    """The best assignment found, with a bound at full depth.

    A large problem without a memory limit goes to message passing first, which most often proves its assignment; so
    does a small one of which no proof is wanted.
    Where repeated layers are known, that happens where equal layers are tied to one choice, and the messages, laid
    along all layers, become a bound of the whole problem: what it proves is proved for untied layers too. Where that is
    not `CLOSE`, segments are stitched. What remains open goes to the solver: the tied problem where messages were
    close, else the whole one, which starts from what the segments gave. A proposal goes no further than tied layers.

    Args:
        built: the problem.
        tiling: which variables repeat others; None where nothing does.
        search: method and limits.
    """
    problem = built.problem
    if search.method != "auto" or problem.limit is not None or (search.proof and not is_large(problem)):
        return _by_solver(problem, search)
    best = by_messages(problem, built.places, tiling, search)
    if best.interrupted or best.gap <= search.close or monotonic() > search.deadline:
        return best
    start = None
    if best.gap > CLOSE:
        stitched = _in_segments(problem, built.places, tiling, search)
        best = better(best, stitched)
        start = stitched.assignment or None
    if best.interrupted or best.gap <= search.close or (search.fast and best.assignment):
        return best
    if tiling is not None:
        if start is None or search.proposal:
            best = better(best, _tied(problem, tiling, search, start))
        if best.interrupted or best.gap <= CLOSE or search.proposal or monotonic() > search.deadline:
            return best
    return better(best, _by_solver(problem, search, start))


def taught(
    lessons: Lessons, resharder: Resharder, tiling: Tiling | None, search: Search, hiding: Hiding | None = None
) -> tuple[Answer, Lessons]:
    """The best assignment of a problem at loose prices by exact ones, and what was learned on the way.

    Args:
        lessons: the problem, at prices that are not above the exact ones.
        resharder: the exact ones.
        tiling: which variables repeat others; None where nothing does.
        search: limits.
        hiding: what reductions of gradients count; all their seconds by default.

    Returns:
        The assignment, with its cost at exact prices and a bound of all; and the problem with the prices learned.
    """
    best = Answer((), float("inf"), -np.inf, "messages", "unknown")
    order, kept, warm = lessons.built.places, None, lessons.messages
    for _ in range(_LESSONS):
        problem = lessons.asked(hiding).problem
        messages = _tied_messages(problem, order, tiling, kept)
        if warm is not None:
            messages.start_from(*warm)
        glance = kept is None and hiding is not None
        relaxed, interrupted = _passes(messages, _GLANCE if glance else _ITERATIONS, search)
        # What bounds tied layers, or some of their options, bounds no others.
        proved = tiling is None and kept is None
        found = replace(_answer(relaxed, interrupted), lower_bound=relaxed.bound if proved else -np.inf)
        chosen, warm = relaxed.assignment, (messages.along, messages.against)
        if kept is None:
            lessons = replace(lessons, messages=warm)
        elif chosen:
            chosen = tuple(int(some[place]) for some, place in zip(kept, chosen, strict=True))
        assignment = tiling.spread(chosen) if tiling is not None and chosen else chosen
        best, lessons, more = _examined(best, found, assignment, lessons, resharder, hiding)
        done = not more or best.gap <= search.close
        if best.interrupted or monotonic() > search.deadline or (done and not glance):
            break
        if kept is None and (glance or tiling is not None):
            kept = messages.near(_NEAR * abs(relaxed.bound))
            warm = messages.among(kept)
    tied = relaxed.bound
    # With other prices of what is hidden, an answer is a proposal: tied layers are enough, if these are close.
    if hiding is not None and best.cost - tied <= CLOSE * abs(best.cost):
        return best, lessons
    if tiling is not None and lessons.messages is not None and not best.interrupted:
        problem = lessons.asked(hiding).problem
        whole = Messages(problem, order)
        whole.start_from(*tiling.messages(problem, tiling.fold(problem), *lessons.messages))
        found = _mended(whole, tiling, order, search, best.cost)
        best, lessons, _ = _examined(best, found, found.assignment, lessons, resharder, hiding)
    for _ in range(_STITCHES):
        if hiding is not None or best.interrupted or best.gap <= CLOSE or monotonic() > search.deadline:
            break
        stitched = _in_segments(lessons.asked(hiding).problem, order, tiling, search)
        best, lessons, more = _examined(best, stitched, stitched.assignment, lessons, resharder, hiding)
        if not more:
            break
    return best, lessons


def _examined(
    best: Answer,
    found: Answer,
    assignment: tuple[int, ...],
    lessons: Lessons,
    resharder: Resharder,
    hiding: Hiding | None,
) -> tuple[Answer, Lessons, bool]:
    """The better of two answers by the exact prices of what the second one uses; and whether these were news."""
    after = lessons.after(assignment, resharder) if assignment else None
    lessons, news = after or lessons, after is not None
    cost = lessons.asked(hiding).problem.cost(assignment) if assignment else float("inf")
    found = replace(found, assignment=assignment if np.isfinite(cost) else (), cost=cost)
    return better(best, found), lessons, news


def better(first: Answer, second: Answer) -> Answer:
    """The cheaper of two answers to one problem, with the higher of their bounds."""
    best = second if second.cost < first.cost else first
    bound = min(max(first.lower_bound, second.lower_bound), best.cost)
    interrupted = first.interrupted or second.interrupted
    return Answer(best.assignment, best.cost, bound, best.method, best.status, interrupted)


def by_messages(problem: Problem, order: list[float], tiling: Tiling | None, search: Search) -> Answer:
    """Message passing, on tied layers first where there are any."""
    folded = _tied_messages(problem, order, tiling)
    if tiling is None:
        relaxed, interrupted = _passes(folded, _ITERATIONS, search)
        return _answer(relaxed, interrupted)
    messages = Messages(problem, order)
    tied, interrupted = _passes(folded, _ITERATIONS, search)
    assignment = tiling.spread(tied.assignment) if tied.assignment else ()
    cost = problem.cost(assignment) if assignment else float("inf")
    messages.start_from(*tiling.messages(problem, folded.problem, folded.along, folded.against))
    if interrupted:
        return Answer(assignment, cost, -np.inf, "messages", "feasible", True)
    relaxed, interrupted = _passes(messages, _MENDING_PRICED if search.priced else _MENDING, search, cost)
    own = Answer(assignment, cost, relaxed.bound, "messages, layers tied", "feasible", interrupted)
    return better(own, _answer(relaxed, interrupted))


def _tied_messages(
    problem: Problem, order: list[float], tiling: Tiling | None, kept: list[IntArray] | None = None
) -> Messages:
    """Messages of a problem, or of its tied layers where there are any; of some of the options alone, if told."""
    if tiling is not None:
        problem, order = tiling.fold(problem), [order[leader] for leader in tiling.leaders]
    return Messages(problem if kept is None else narrowed(problem, kept), order)


def _passes(messages: Messages, iterations: int, search: Search, upper: float = float("inf")) -> tuple[Relaxed, bool]:
    """Iterations, and whether somebody stopped them."""
    told = search.told
    best = messages.run(1, upper=upper, deadline=search.deadline)
    try:
        best = messages.run(
            iterations,
            upper=upper,
            patient=not search.proof,
            deadline=search.deadline,
            progress=lambda cost, bound: told("messages", min(cost, upper), bound),
        )
    except KeyboardInterrupt:
        return best, True
    return best, False


def _mended(whole: Messages, tiling: Tiling, order: list[float], search: Search, upper: float) -> Answer:
    """Some passes at full depth, then more among the options that these leave open below a known cost.

    What is left out costs at least `upper`, so that no assignment costs less than it and what bounds the others. Layers
    keep the same options, to go on sharing their tables.
    """
    relaxed, interrupted = _passes(whole, _LAID, search, upper)
    slack = upper - relaxed.bound + _ROUNDING * abs(upper)
    if interrupted or not np.isfinite(slack) or slack <= search.close * abs(upper):
        return _answer(relaxed, interrupted)
    whole.run(1, upper=upper)
    open_: dict[int, IntArray] = {}
    for leader, own in zip(tiling.follows, whole.near(slack), strict=True):
        open_[leader] = np.union1d(open_[leader], own) if leader in open_ else own
    kept = [open_[leader] for leader in tiling.follows]
    rest = Messages(narrowed(whole.problem, kept), order)
    rest.start_from(*whole.among(kept))
    relaxed, interrupted = _passes(rest, _MENDING, search, upper)
    assignment = tuple(int(some[place]) for some, place in zip(kept, relaxed.assignment, strict=False))
    return replace(_answer(relaxed, interrupted), assignment=assignment, lower_bound=min(relaxed.bound, upper))


def _answer(relaxed: Relaxed, interrupted: bool) -> Answer:
    return Answer(
        relaxed.assignment, relaxed.cost, min(relaxed.bound, relaxed.cost), "messages", "feasible", interrupted
    )


def _in_segments(problem: Problem, order: list[float], tiling: Tiling | None, search: Search) -> Answer:
    """The hierarchy, on tied layers where there are any: its own bound is then none of the whole problem."""
    try:
        if tiling is None:
            found = solve_in_segments(problem, order, deadline=search.deadline)
            return Answer(found.assignment, found.cost, found.lower_bound, "segments", "feasible")
        leaders = [order[leader] for leader in tiling.leaders]
        found = solve_in_segments(tiling.fold(problem), leaders, deadline=search.deadline)
    except KeyboardInterrupt:
        return Answer((), float("inf"), -np.inf, "segments", "feasible", True)
    assignment = tiling.spread(found.assignment) if found.assignment else ()
    cost = problem.cost(assignment) if assignment else float("inf")
    return Answer(assignment, cost, -np.inf, "segments, layers tied", "feasible")


def _tied(problem: Problem, tiling: Tiling, search: Search, start: tuple[int, ...] | None) -> Answer:
    """The problem in which equal layers choose alike, by the solver; its own bound is none of the whole problem.

    `start` is an assignment of the whole problem in which they do, if one is known.
    """
    leading = None if start is None else tuple(start[leader] for leader in tiling.leaders)
    found = _by_solver(tiling.fold(problem), search, leading)
    if not found.assignment:
        return Answer((), float("inf"), -np.inf, found.method, found.status, found.interrupted)
    assignment = tiling.spread(found.assignment)
    method = f"{found.method}, layers tied"
    return Answer(assignment, problem.cost(assignment), -np.inf, method, "feasible", found.interrupted)


def _by_solver(problem: Problem, search: Search, start: tuple[int, ...] | None = None) -> Answer:
    solution = solve(
        problem,
        method="alternate" if search.method == "auto" and not search.proof else search.method,
        time_limit=max(1.0, search.deadline - monotonic()),
        work_limit=search.work_limit,
        progress=lambda one: search.told(one.phase, one.cost, one.lower_bound),
        start=start,
    )
    return Answer(
        solution.assignment,
        solution.cost,
        solution.lower_bound,
        solution.method,
        solution.status,
        solution.interrupted,
    )


def is_large(problem: Problem) -> bool:
    """Whether a problem goes to message passing first."""
    return sum(math.prod(edge.shape) for edge in problem.edges) >= _LARGE
