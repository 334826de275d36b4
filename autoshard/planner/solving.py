"""Solves one problem of the planner: large ones by message passing first, and by the solver where a gap is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from autoshard.planner.planning_problem import BuiltProblem
from autoshard.planner.tiling import Tiling
from autoshard.solver import Problem, solve
from autoshard.solver.hierarchy import solve_in_segments
from autoshard.solver.problem import IntArray
from autoshard.solver.solver_budget import Budget
from autoshard.solver.trws import Messages, RelaxationResult, restrict_problem

Report = Callable[[str, float, float], None]
"""A function of the phase, the least known cost, and the bound."""

# Entries of all edge tables from which messages are tried first: smaller problems are solved exactly at once.
LARGE = 200_000

ITERATIONS = 120  # forward and backward passes, at most
REPAIR_ITERATIONS = 40  # passes at full depth, at most, that mend messages of a few layers
_PRICED_REPAIR_ITERATIONS = 11  # the same at prices of memory: more find no better plan, and bounds are not used

# Relative gaps.
PROVED = 1e-4  # the search ends, as integer programming solvers do by default: prices are not known better
ENOUGH = 1e-3  # no further method begins: it takes many times as long as the methods that came so close
_PRICED_GAP = 2e-2  # the search ends at prices of memory: the plan for a limit is chosen among plans at many prices
_HOPELESS_GAP = 2e-2  # of a proposal: the solver would not close it in the time that a proposal is worth
CLOSE = 5e-3  # tied layers are good enough; above it, the solver looks at every layer by itself


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Method and limits for one problem.

    Attributes:
        method: a method of the solver.
        deadline: the latest end, as of `time.monotonic()`.
        proof: True if the bound is needed; otherwise a good assignment is enough.
        priced: True if memory has a price.
        fast: True if an assignment of messages, or of segments if these leave a gap, is good enough.
        proposal: True if the timeline will judge the plan; tied layers are then good enough.
        work_limit: the solver's work limit; None for no limit.
        report: gets reports about the search.
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
        status: the status, as the solver's.
        interrupted: True if the search was interrupted.
    """

    assignment: tuple[int, ...] = ()
    cost: float = math.inf
    lower_bound: float = -math.inf
    method: str = "messages"
    status: str = "feasible"
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """Relative gap between cost and bound; `inf` without an assignment."""
        return (self.cost - self.lower_bound) / max(abs(self.cost), 1e-300) if self.assignment else math.inf


def solve_problem(built: BuiltProblem, tiling: Tiling | None, options: SolveOptions) -> SolveResult:
    """Return the best assignment that is found, with a bound of the whole problem.

    1. Message passing, for large problems without a memory limit, and for all that need no proof. With repeated layers
       it runs on layers tied to one choice; the messages, laid along all layers, then become a bound of the whole
       problem, so that a proof holds for layers that choose freely too. Most often it proves its assignment.
    2. Segments, if the gap is not `CLOSE`.
    3. The solver: on the tied problem if messages were close, else on the whole one, starting from the segments'
       assignment. A proposal goes no further than tied layers.

    Args:
        built: the problem.
        tiling: the repeated layers; None if there are none.
        options: method and limits.
    """
    problem = built.problem
    if options.method != "auto" or problem.limit is not None or (options.proof and not is_large(problem)):
        return _call_solver(problem, options)
    # Messages most often prove their assignment, in less time than the other methods take to start.
    best = solve_by_messages(problem, built.program_positions, tiling, options)
    enough = max(options.gap_goal, ENOUGH)
    if best.interrupted or best.gap <= enough or monotonic() > options.deadline:
        return best
    start = None
    # Segments take time, and help only where messages leave a gap.
    if best.gap > CLOSE:
        by_segments = solve_by_segments(problem, built.program_positions, tiling, options)
        best = better_result(best, by_segments)
        start = by_segments.assignment or None
    if best.interrupted or best.gap <= enough or (options.fast and best.assignment):
        return best
    if options.proposal and best.assignment and best.gap > _HOPELESS_GAP:
        return best
    if tiling is not None:
        if start is None or options.proposal:
            best = better_result(best, _solve_tied(problem, tiling, options, start))
        if best.interrupted or best.gap <= CLOSE or options.proposal or monotonic() > options.deadline:
            return best
    return better_result(best, _call_solver(problem, options, start))


def is_large(problem: Problem) -> bool:
    """Return True if a problem goes to message passing first."""
    return sum(math.prod(edge.shape) for edge in problem.edges) >= LARGE


def better_result(first: SolveResult, second: SolveResult) -> SolveResult:
    """Return the cheaper of two results for one problem, with the higher of their bounds."""
    best = second if second.cost < first.cost else first
    # Rounding may put a bound above the cost.
    bound = min(max(first.lower_bound, second.lower_bound), best.cost)
    return replace(best, lower_bound=bound, interrupted=first.interrupted or second.interrupted)


def solve_by_messages(
    problem: Problem, order: list[float], tiling: Tiling | None, options: SolveOptions
) -> SolveResult:
    """Return the result of message passing, which starts on tied layers if there are any."""
    folded = tied_messages(problem, order, tiling)
    tied, interrupted = run_messages(folded, ITERATIONS, options)
    if tiling is None:
        return result_of_messages(tied, interrupted)
    assignment, cost = _spread(problem, tiling, tied.assignment)
    method = "messages, layers tied"
    if options.proposal:
        # Tied layers are good enough, and so is the bound of the tied problem.
        return SolveResult(assignment, cost, min(tied.bound, cost), method, interrupted=interrupted)
    messages = Messages(problem, order)
    messages.start_from(*tiling.messages(problem, folded.along, folded.against))
    if interrupted:
        return SolveResult(assignment, cost, interrupted=True)
    iterations = _PRICED_REPAIR_ITERATIONS if options.priced else REPAIR_ITERATIONS
    whole, interrupted = run_messages(messages, iterations, options, cost, options.gap_goal)
    result = SolveResult(assignment, cost, whole.bound, method, interrupted=interrupted)
    return better_result(result, result_of_messages(whole, interrupted))


def tied_messages(
    problem: Problem, order: list[float], tiling: Tiling | None, kept: Sequence[IntArray] | None = None
) -> Messages:
    """Return the messages of a problem, or of its tied layers if there are any; `kept` restricts the options."""
    if tiling is not None:
        return Messages(tiling.fold(problem, kept), [order[leader] for leader in tiling.leaders])
    return Messages(problem if kept is None else restrict_problem(problem, kept), order)


def run_messages(
    messages: Messages, iterations: int, options: SolveOptions, upper: float = float("inf"), close: float = 0.0
) -> tuple[RelaxationResult, bool]:
    """Run iterations until the bound is close to a known cost.

    Args:
        messages: the messages.
        iterations: the most iterations.
        options: limits.
        upper: the known cost.
        close: the relative gap at which to stop.

    Returns:
        The result, and True if the search was interrupted.
    """
    report, budget = options.report_progress, Budget(options.deadline)
    # The first pass stands outside of `try`: without it there is no result to return.
    best = messages.run(1, upper=upper, close=close, budget=budget)
    known = min(upper, best.cost)
    if known - best.bound <= close * abs(known):
        return best, False
    try:
        best = messages.run(
            iterations,
            upper=upper,
            close=close,
            budget=budget,
            progress=lambda cost, bound: report("messages", min(cost, upper), bound),
        )
    except KeyboardInterrupt:
        return best, True
    return best, False


def result_of_messages(relaxed: RelaxationResult, interrupted: bool) -> SolveResult:
    """Return the result of iterations as one of the problem."""
    return SolveResult(relaxed.assignment, relaxed.cost, min(relaxed.bound, relaxed.cost), interrupted=interrupted)


def solve_by_segments(
    problem: Problem, order: list[float], tiling: Tiling | None, options: SolveOptions
) -> SolveResult:
    """Return the result of the hierarchy of segments, on tied layers if there are any; it then has no bound."""
    try:
        if tiling is None:
            solution = solve_in_segments(problem, order, budget=Budget(options.deadline))
            return SolveResult(solution.assignment, solution.cost, solution.lower_bound, "segments")
        leaders = [order[leader] for leader in tiling.leaders]
        solution = solve_in_segments(tiling.fold(problem), leaders, budget=Budget(options.deadline))
    except KeyboardInterrupt:
        return SolveResult(method="segments", interrupted=True)
    # The bound of tied layers is none of the whole problem.
    return SolveResult(*_spread(problem, tiling, solution.assignment), method="segments, layers tied")


def _solve_tied(problem: Problem, tiling: Tiling, options: SolveOptions, start: tuple[int, ...] | None) -> SolveResult:
    """Return the solver's result for tied layers; `start` is an assignment of the whole problem with tied layers."""
    leading = None if start is None else tuple(start[leader] for leader in tiling.leaders)
    tied = _call_solver(tiling.fold(problem), options, leading)
    if not tied.assignment:
        return replace(tied, cost=math.inf, lower_bound=-math.inf)
    # The bound of tied layers is none of the whole problem.
    assignment, cost = _spread(problem, tiling, tied.assignment)
    return SolveResult(assignment, cost, method=f"{tied.method}, layers tied", interrupted=tied.interrupted)


def _spread(problem: Problem, tiling: Tiling, tied: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """Return an assignment of tied layers as one of the whole problem, and its cost."""
    if not tied:
        return (), math.inf
    assignment = tiling.spread(tied)
    return assignment, problem.cost(assignment)


def _call_solver(problem: Problem, options: SolveOptions, start: tuple[int, ...] | None = None) -> SolveResult:
    # Without a need for a proof, alternating search is quicker than the methods that bound.
    solution = solve(
        problem,
        method="alternate" if options.method == "auto" and not options.proof else options.method,
        time_limit=max(1.0, options.deadline - monotonic()),
        work_limit=options.work_limit,
        gap=ENOUGH,
        progress=lambda progress: options.report_progress(progress.phase, progress.cost, progress.lower_bound),
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
