"""Solves one problem of the planner: a large one first by message passing, then, if a gap is left, by the solver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.tiling import Tiling
from autoshard.solver import Problem, solve
from autoshard.solver.hierarchy import solve_in_segments
from autoshard.solver.problem import Array
from autoshard.solver.reduced_problem import ReducedProblem, untie_messages
from autoshard.solver.solver_budget import Budget
from autoshard.solver.trws import Messages

Report = Callable[[str, float, float], None]
"""A function of the phase, the smallest known cost, and the bound."""

# Total entries of edge tables from which messages are tried first. Smaller problems are solved exactly at once.
LARGE = 200_000

ITERATIONS = 120  # forward and backward passes, at most
REPAIR_ITERATIONS = 40  # passes over all layers, at most, that repair messages from tied ones
_PRICED_REPAIR_ITERATIONS = 11  # the same at prices of memory: more find no better plan, and bounds are not used

# Relative gaps.
PROVED = 1e-4  # ends the search, as by default in integer programming solvers: prices are no more accurate
ENOUGH = 1e-3  # no further method starts: it would take many times as long as those before
_PRICED_GAP = 2e-2  # ends the search at prices of memory: the plan for a limit is chosen among plans at many prices
CLOSE = 5e-3  # tied layers are good enough; above it, the solver treats every layer separately


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Method and limits for one problem.

    Attributes:
        method: a method of the solver.
        budget: ends the search; Ctrl-C ends it with the best result so far.
        proof: True if the bound is needed; otherwise a good assignment is enough.
        priced: True if memory has a price.
        fast: True if an assignment of messages, or of segments if these leave a gap, is good enough.
        proposal: True if the timeline will judge the plan. Tied layers are then good enough, and neighbourhoods of the
            assignment of messages replace segments.
        work_limit: the solver's work limit; None for no limit.
        report: receives reports about the search.
    """

    method: str
    budget: Budget
    proof: bool = True
    priced: bool = False
    fast: bool = False
    proposal: bool = False
    work_limit: int | None = None
    report: Report | None = None

    @property
    def gap_goal(self) -> float:
        """Relative gap at which the search ends."""
        if self.proposal:
            return CLOSE
        return _PRICED_GAP if self.priced else PROVED

    def report_progress(self, phase: str, cost: float, bound: float) -> None:
        if self.report is not None:
            self.report(phase, cost, bound)


@dataclass(frozen=True, slots=True)
class SolveResult:
    """The result for one problem.

    Attributes:
        assignment: an option per variable; empty if none is known.
        cost: cost of the assignment.
        lower_bound: a lower bound of the cost of every assignment.
        method: the method that found the assignment.
        status: the solver's status.
    """

    assignment: tuple[int, ...] = ()
    cost: float = math.inf
    lower_bound: float = -math.inf
    method: str = "messages"
    status: str = "feasible"

    @property
    def gap(self) -> float:
        """Relative gap between cost and bound; `inf` without an assignment."""
        return (self.cost - self.lower_bound) / max(abs(self.cost), 1e-300) if self.assignment else math.inf


def solve_problem(built: BuiltProblem, tiling: Tiling | None, options: SolveOptions) -> SolveResult:
    """Return the best assignment found, with a bound of the whole problem.

    1. Message passing, for large problems without a memory limit, and for all that need no proof. With repeated layers
       it runs on layers tied to one choice; the messages, copied to all layers, then give a bound of the whole
       problem, so that a proof also holds for layers that choose freely. Usually it proves its assignment.
    2. A proposal ends with the solver on tied layers: without a proof, in neighbourhoods of the messages' assignment.
    3. Segments, if the gap is not `CLOSE`.
    4. The solver: on the tied problem if messages were close, else on the whole one, starting from the segments'
       assignment.

    Args:
        built: the problem.
        tiling: the repeated layers; None if there are none.
        options: method and limits.

    Raises:
        KeyboardInterrupt: the search was interrupted before it found an assignment.
    """
    best = _search(ReducedProblem.of(built.problem, built.program_positions), tiling, options)
    if options.budget.interrupted and not best.assignment:
        raise KeyboardInterrupt
    return best


def _search(whole: ReducedProblem, tiling: Tiling | None, options: SolveOptions) -> SolveResult:
    problem, budget = whole.problem, options.budget
    if options.method != "auto" or problem.limit is not None or (options.proof and not is_large(problem)):
        return _call_solver(whole, options)
    tied = whole if tiling is None else tiling.tie(whole)
    # Messages usually prove their assignment in less time than the other methods take to start.
    best = solve_by_messages(whole, tied, options)
    enough = max(options.gap_goal, ENOUGH)
    if best.gap <= enough or budget.is_over:
        return best
    if options.proposal:
        # Neighbourhoods of the messages' assignment get closer than segments, in a tenth of the time.
        return better_result(best, _call_solver(tied, options, best.assignment or None))
    start = None
    # Segments take time, and help only where messages leave a gap.
    if best.gap > CLOSE:
        by_segments = solve_by_segments(tied, options)
        best = better_result(best, by_segments)
        start = by_segments.assignment or None
    if budget.interrupted or best.gap <= enough or (options.fast and best.assignment):
        return best
    if tied is not whole:
        if start is None:
            best = better_result(best, _call_solver(tied, options, start))
        if best.gap <= CLOSE or budget.is_over:
            return best
    return better_result(best, _call_solver(whole, options, start))


def is_large(problem: Problem) -> bool:
    """Return True if a problem is first solved by message passing."""
    return sum(math.prod(edge.shape) for edge in problem.edges) >= LARGE


def better_result(first: SolveResult, second: SolveResult) -> SolveResult:
    """Return the cheaper of two results for one problem, with the higher of their bounds."""
    best = second if second.cost < first.cost else first
    # Rounding may put a bound above the cost.
    bound = min(max(first.lower_bound, second.lower_bound), best.cost)
    return replace(best, lower_bound=bound)


def solve_by_messages(whole: ReducedProblem, tied: ReducedProblem, options: SolveOptions) -> SolveResult:
    """Return the result of message passing, first on tied layers if there are any."""
    folded = run_messages(tied, ITERATIONS, options)
    best = result_of_messages(tied, folded)
    if tied is whole:
        return best
    if options.proposal:
        # Tied layers are good enough, and so is the bound of the tied problem.
        return replace(best, lower_bound=min(folded.bound, best.cost))
    if options.budget.interrupted:
        return best
    iterations = _PRICED_REPAIR_ITERATIONS if options.priced else REPAIR_ITERATIONS
    assert tied.follows is not None
    start = untie_messages(whole.problem, tied.follows, folded.along, folded.against)
    messages = run_messages(whole, iterations, options, start=start, upper=best.cost, close=options.gap_goal)
    return better_result(best, result_of_messages(whole, messages))


Start = tuple[Sequence[Array | None], Sequence[Array | None]]
"""Messages along and against every edge; None for none."""


def run_messages(
    reduced: ReducedProblem,
    iterations: int,
    options: SolveOptions,
    *,
    start: Start | None = None,
    upper: float = math.inf,
    close: float = 0.0,
) -> Messages:
    """Return messages after iterations that end when the bound is close to a known cost.

    Args:
        reduced: the problem.
        iterations: the maximum of iterations.
        options: limits.
        start: the first messages.
        upper: the known cost.
        close: the relative gap at which to stop.
    """
    messages, report = Messages(reduced.problem, reduced.order), options.report_progress
    if start is not None:
        messages.start_from(*start)
    with options.budget.interruptible():
        # Round after the first pass and after the second: their choices are often the best.
        messages.run(1, upper=upper, close=close, budget=options.budget)
        messages.run(
            iterations,
            upper=upper,
            close=close,
            budget=options.budget,
            progress=lambda cost, bound: report("messages", min(cost, upper), bound),
        )
    return messages


def result_of_messages(reduced: ReducedProblem, messages: Messages) -> SolveResult:
    """Return the result of message passing for the whole problem."""
    return _result(reduced, messages.assignment, messages.bound, "messages")


def solve_by_segments(reduced: ReducedProblem, options: SolveOptions) -> SolveResult:
    """Return the result of the hierarchy of segments."""
    with options.budget.interruptible():
        found = solve_in_segments(reduced.problem, reduced.order, budget=options.budget)
        return _result(reduced, found.assignment, found.lower_bound, "segments")
    return SolveResult(method="segments")


def _call_solver(reduced: ReducedProblem, options: SolveOptions, start: tuple[int, ...] | None = None) -> SolveResult:
    """Return the result of the solver; `start` is an assignment of the whole problem that `reduced` can have too."""
    with options.budget.interruptible():
        # If no proof is needed, alternating search is quicker than the methods with bounds.
        solution = solve(
            reduced.problem,
            method="alternate" if options.method == "auto" and not options.proof else options.method,
            time_limit=max(1.0, options.budget.seconds),
            work_limit=options.work_limit,
            gap=ENOUGH,
            progress=lambda progress: options.report_progress(progress.phase, progress.cost, progress.lower_bound),
            start=None if start is None else reduced.contract(start),
            proof=not options.proposal,
        )
        if solution.interrupted:
            options.budget.interrupt()
        return _result(reduced, solution.assignment, solution.lower_bound, solution.method, solution.status)
    return SolveResult(method=options.method)


def _result(
    reduced: ReducedProblem, assignment: Sequence[int], bound: float, method: str, status: str = "feasible"
) -> SolveResult:
    """Return the result for the whole problem from one for a reduced problem."""
    chosen = reduced.solution(assignment)
    cost = reduced.whole.cost(chosen) if chosen else math.inf
    # Rounding may put a bound above the cost.
    bound = min(reduced.bound(bound), cost)
    if reduced.follows is None:
        return SolveResult(chosen, cost, bound, method, status)
    return SolveResult(chosen, cost, bound, f"{method}, layers tied")
