"""One problem of the planner, solved: by messages where it is large, by the solver's other ways where a gap is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.tiling import Tiling
from autoshard.solver import Problem, solve
from autoshard.solver.hierarchy import solve_in_segments
from autoshard.solver.problem import IntArray
from autoshard.solver.trws import Messages, RelaxationResult, restrict_problem

Report = Callable[[str, float, float], None]
"""Told of what is being done, the least cost known, and the bound."""

_LARGE = 200_000
"""Entries of all edge tables from which messages are tried first: smaller problems are solved exactly at once."""

ITERATIONS = 120
"""Passes there and back, at most."""

REPAIR_ITERATIONS = 40
"""Passes there and back at full depth, at most, that mend messages found on a few layers."""

_PRICED_REPAIR_ITERATIONS = 11
"""The same where memory has a price: what more of them find is no better, and bounds are not wanted."""

_PROVED = 1e-4
"""Relative gap at which nothing is left to look for, as of solvers of integer programs by default: prices are not known
better."""

ENOUGH = 1e-3
"""The same where another way of solving would have to begin, or the solver to go on: it takes many times as long as
what came so close."""

_PRICED_GAP = 2e-2
"""The same where memory has a price: what the limit is kept by is chosen among plans at many prices."""

_HOPELESS_GAP = 2e-2
"""Relative gap of a proposal that the solver would not close in the time that a proposal is worth."""

CLOSE = 5e-3
"""Relative gap at which a plan of tied layers stands; where it is larger, every layer is looked at by itself."""


@dataclass(frozen=True, slots=True)
class SolveOptions:
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
    def gap_goal(self) -> float:
        """Relative gap at which the search ends."""
        return _PRICED_GAP if self.priced else _PROVED

    def report_progress(self, phase: str, cost: float, bound: float) -> None:
        if self.report is not None:
            self.report(phase, cost, bound)


@dataclass(frozen=True, slots=True)
class SolveResult:
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


def solve_problem(built: BuiltProblem, tiling: Tiling | None, search: SolveOptions) -> SolveResult:
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
        return _call_solver(problem, search)
    best = solve_by_messages(problem, built.program_positions, tiling, search)
    enough = max(search.gap_goal, ENOUGH)
    if best.interrupted or best.gap <= enough or monotonic() > search.deadline:
        return best
    start = None
    if best.gap > CLOSE:
        stitched = solve_by_segments(problem, built.program_positions, tiling, search)
        best = better_result(best, stitched)
        start = stitched.assignment or None
    if best.interrupted or best.gap <= enough or (search.fast and best.assignment):
        return best
    if search.proposal and best.assignment and best.gap > _HOPELESS_GAP:
        return best
    if tiling is not None:
        if start is None or search.proposal:
            best = better_result(best, _solve_tied(problem, tiling, search, start))
        if best.interrupted or best.gap <= CLOSE or search.proposal or monotonic() > search.deadline:
            return best
    return better_result(best, _call_solver(problem, search, start))


def better_result(first: SolveResult, second: SolveResult) -> SolveResult:
    """The cheaper of two answers to one problem, with the higher of their bounds."""
    best = second if second.cost < first.cost else first
    bound = min(max(first.lower_bound, second.lower_bound), best.cost)
    interrupted = first.interrupted or second.interrupted
    return SolveResult(best.assignment, best.cost, bound, best.method, best.status, interrupted)


def solve_by_messages(problem: Problem, order: list[float], tiling: Tiling | None, search: SolveOptions) -> SolveResult:
    """Message passing, on tied layers first where there are any."""
    folded = tied_messages(problem, order, tiling)
    if tiling is None:
        relaxed, interrupted = run_messages(folded, ITERATIONS, search)
        return result_of_messages(relaxed, interrupted)
    tied, interrupted = run_messages(folded, ITERATIONS, search)
    assignment = tiling.spread(tied.assignment) if tied.assignment else ()
    cost = problem.cost(assignment) if assignment else float("inf")
    if search.proposal:  # tied layers are good enough, and so is what bounds them
        bound = min(tied.bound, cost)
        return SolveResult(assignment, cost, bound, "messages, layers tied", "feasible", interrupted)
    messages = Messages(problem, order)
    messages.start_from(*tiling.messages(problem, folded.along, folded.against))
    if interrupted:
        return SolveResult(assignment, cost, -np.inf, "messages", "feasible", True)
    mending = _PRICED_REPAIR_ITERATIONS if search.priced else REPAIR_ITERATIONS
    relaxed, interrupted = run_messages(messages, mending, search, cost, search.gap_goal)
    own = SolveResult(assignment, cost, relaxed.bound, "messages, layers tied", "feasible", interrupted)
    return better_result(own, result_of_messages(relaxed, interrupted))


def tied_messages(
    problem: Problem, order: list[float], tiling: Tiling | None, kept: Sequence[IntArray] | None = None
) -> Messages:
    """Messages of a problem, or of its tied layers where there are any; of some of the options alone, if told."""
    if tiling is not None:
        return Messages(tiling.fold(problem, kept), [order[leader] for leader in tiling.leaders])
    return Messages(problem if kept is None else restrict_problem(problem, kept), order)


def run_messages(
    messages: Messages, iterations: int, search: SolveOptions, upper: float = float("inf"), close: float = 0.0
) -> tuple[RelaxationResult, bool]:
    """Iterations, until the bound is as close to a known cost as is asked for, and whether somebody stopped them."""
    told = search.report_progress
    best = messages.run(1, upper=upper, close=close, deadline=search.deadline)
    known = min(upper, best.cost)
    if known - best.bound <= close * abs(known):
        return best, False
    try:
        best = messages.run(
            iterations,
            upper=upper,
            close=close,
            patient=not search.proof,
            deadline=search.deadline,
            progress=lambda cost, bound: told("messages", min(cost, upper), bound),
        )
    except KeyboardInterrupt:
        return best, True
    return best, False


def result_of_messages(relaxed: RelaxationResult, interrupted: bool) -> SolveResult:
    """What passes have found, as an answer."""
    return SolveResult(
        relaxed.assignment, relaxed.cost, min(relaxed.bound, relaxed.cost), "messages", "feasible", interrupted
    )


def solve_by_segments(problem: Problem, order: list[float], tiling: Tiling | None, search: SolveOptions) -> SolveResult:
    """The hierarchy, on tied layers where there are any: its own bound is then none of the whole problem."""
    try:
        if tiling is None:
            found = solve_in_segments(problem, order, deadline=search.deadline)
            return SolveResult(found.assignment, found.cost, found.lower_bound, "segments", "feasible")
        leaders = [order[leader] for leader in tiling.leaders]
        found = solve_in_segments(tiling.fold(problem), leaders, deadline=search.deadline)
    except KeyboardInterrupt:
        return SolveResult((), float("inf"), -np.inf, "segments", "feasible", True)
    assignment = tiling.spread(found.assignment) if found.assignment else ()
    cost = problem.cost(assignment) if assignment else float("inf")
    return SolveResult(assignment, cost, -np.inf, "segments, layers tied", "feasible")


def _solve_tied(problem: Problem, tiling: Tiling, search: SolveOptions, start: tuple[int, ...] | None) -> SolveResult:
    """The problem in which equal layers choose alike, by the solver; its own bound is none of the whole problem.

    `start` is an assignment of the whole problem in which they do, if one is known.
    """
    leading = None if start is None else tuple(start[leader] for leader in tiling.leaders)
    found = _call_solver(tiling.fold(problem), search, leading)
    if not found.assignment:
        return SolveResult((), float("inf"), -np.inf, found.method, found.status, found.interrupted)
    assignment = tiling.spread(found.assignment)
    method = f"{found.method}, layers tied"
    return SolveResult(assignment, problem.cost(assignment), -np.inf, method, "feasible", found.interrupted)


def _call_solver(problem: Problem, search: SolveOptions, start: tuple[int, ...] | None = None) -> SolveResult:
    solution = solve(
        problem,
        method="alternate" if search.method == "auto" and not search.proof else search.method,
        time_limit=max(1.0, search.deadline - monotonic()),
        work_limit=search.work_limit,
        gap=ENOUGH,
        progress=lambda one: search.report_progress(one.phase, one.cost, one.lower_bound),
        start=start,
    )
    return SolveResult(
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
