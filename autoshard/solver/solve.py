"""The entry of the solver: from a problem to the best assignment, with a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.solver.bound import TOLERANCE, certify, lower_bound
from autoshard.solver.core import Core
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.incumbent import Incumbent, SolverProgress
from autoshard.solver.local_search import NO_ASSIGNMENT, ScoredAssignment, alternate, cheaper_of, improve, score, soften
from autoshard.solver.presolve import FOLD, REDUCE, presolve
from autoshard.solver.problem import Moments, Problem, SolverError
from autoshard.solver.solver_budget import Budget

METHODS = ("auto", "eliminate", "alternate", "ilp")

_ROUNDING_ITERATIONS = 30
"""Iterations of the relaxation if only its rounded assignment is needed."""

_INTEGER_CELLS = 80_000
"""Entries of edge tables up to which the rest of a proof goes to the integer program."""

_WORK = 100
"""Units of work of exact elimination per table entry."""

_SMALL = 4_000
"""Entries of edge tables up to which a problem under a limit goes to the integer program at once."""

_LARGE = 10_000
"""Nodes from which a problem without `components` goes to flat arrays at once."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of `solve`.

    Attributes:
        assignment: a strategy per node; empty if none is known.
        cost: of the assignment; `inf` without one.
        lower_bound: no feasible assignment costs less; `inf` if there is none.
        peak: most bytes of the assignment at any moment.
        status: "optimal" (proved, up to a relative 1e-9), "feasible", "infeasible" (proved) or "unknown".
        method: the method that found the assignment.
        seconds: wall-clock time of the solve.
        interrupted: True if Ctrl-C ended the search; the fields hold the results so far.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    peak: float
    status: str
    method: str
    seconds: float
    interrupted: bool = False

    @property
    def gap(self) -> float:
        """(cost - lower bound) / |cost|; 0 if optimal, `inf` without an assignment."""
        if self.status == "optimal":
            return 0.0
        if not self.assignment:
            return float("inf")
        return (self.cost - self.lower_bound) / max(abs(self.cost), 1e-300)


def solve(
    problem: Problem,
    *,
    method: str = "auto",
    time_limit: float = 30.0,
    work_limit: int | None = None,
    gap: float = 0.0,
    seed: int = 0,
    progress: Callable[[SolverProgress], object] | None = None,
    start: Sequence[int] | None = None,
) -> Solution:
    """Solve a problem.

    Args:
        problem: the problem.
        method: "auto" chooses among all methods: exact elimination, alternation with a proof, presolve with prices on
            memory and large neighbourhoods, the integer program. "eliminate" is exact elimination alone. "alternate"
            solves one mesh axis after another, or large neighbourhoods where the problem has no `components`, with a
            bound but without the effort of a proof. "ilp" is the memory-constrained integer program of Rhino 4.2 and
            4.4.
        time_limit: seconds. It shortens the search; the result is correct whenever the search ends. Reading the problem
            and the first assignment are not interrupted.
        work_limit: units of work, about one table entry read, some 10**8 of them a second; checked between the steps of
            the search. Two solves that end by it give the same result on machines of any speed.
        gap: relative difference of the best cost and the bound at which the search ends; checked between its steps. 0
            for a proof.
        seed: of the random numbers. The same problem and seed give the same solution, unless the time limit ends the
            search.
        progress: called with the best cost and the bound when they move.
        start: a known assignment of finite cost. If no memory limit binds, "auto" and "alternate" improve it instead of
            searching for one of their own; a good one makes the proof shorter. It has no other effect.

    Returns:
        The best assignment found. After Ctrl-C it is the best one so far, and `interrupted` is set.

    Raises:
        SolverError: an unknown method; a gap below 0; a start that is no assignment of finite cost; or "eliminate" if
            the tables would be too large, or if the memory limit binds.
        KeyboardInterrupt: Ctrl-C before any feasible assignment was known.
    """
    if method not in METHODS:
        raise SolverError(f'method "{method}" does not exist; choose one of {", ".join(METHODS)}')
    if work_limit is not None and work_limit < 1:
        raise SolverError(f"work_limit={work_limit} allows nothing; give a positive number of units, or None")
    if not gap >= 0.0:
        raise SolverError(f"gap={gap} is no relative difference; give one of at least 0, such as 1e-3")
    initial = NO_ASSIGNMENT if start is None else ScoredAssignment(tuple(start), problem.cost(start))
    if initial.choices and not np.isfinite(initial.cost):
        raise SolverError("start uses a forbidden strategy or pair; give an assignment of finite cost, or None")
    budget = Budget.of_seconds(time_limit, work_limit=work_limit, gap=gap)
    incumbent = Incumbent(budget, progress)
    with budget.interruptible():
        task = _SolveState(problem, incumbent, seed, initial)
        outcome = (
            _METHODS[method](task) if problem.size else _MethodResult(ScoredAssignment((), 0.0), 0.0, True, method)
        )
    if not budget.interrupted:
        return _solution(problem, outcome, incumbent)
    if not incumbent.assignment:
        raise KeyboardInterrupt
    return _incumbent_solution(problem, incumbent)


@dataclass(frozen=True, slots=True)
class _MethodResult:
    """A result before it is checked against the problem; `proved` is True if it is final, with or without an
    assignment."""

    best: ScoredAssignment
    bound: float
    proved: bool
    method: str


class _SolveState:
    """A problem during its solve: its moments, best results, and the assignment that it starts from."""

    def __init__(self, problem: Problem, incumbent: Incumbent, seed: int, start: ScoredAssignment) -> None:
        self.problem = problem
        self.incumbent = incumbent
        self.budget = incumbent.budget
        self.seed = seed
        self.start = start
        self.moments = _binding_moments(problem)
        self.large = problem.size >= _LARGE and problem.components is None

    @cached_property
    def free(self) -> Core:
        """The problem without its limit."""
        return Core.of(self.problem, memory=False)

    @cached_property
    def folded(self) -> Core:
        """The problem without its limit, as far as it gets smaller without the loss of an allowed choice."""
        return presolve(self.free, effort=FOLD)

    def fits(self, choices: Sequence[int]) -> bool:
        return self.moments is None or self.moments.within_limit(self.moments.loads(choices))

    def record(self, phase: str, candidate: ScoredAssignment, bound: float, work: float) -> None:
        """Record the result of a step without the limit, a bound of every assignment, and the work of the step."""
        if np.isfinite(candidate.cost) and self.fits(candidate.choices):
            self.incumbent.offer(candidate.cost, lambda: candidate.choices, phase)
        self.incumbent.raise_bound(bound)
        self.budget.spend(work)
        self.incumbent.report(phase)


def _binding_moments(problem: Problem) -> Moments | None:
    """Return the moments, or None if no assignment can exceed the limit."""
    if problem.limit is None:
        return None
    moments = Moments.of(problem)
    # A negative limit allows nothing, not even a problem without moments.
    return None if moments.within_limit(moments.most()) and problem.limit >= 0 else moments


def _solution(problem: Problem, outcome: _MethodResult, incumbent: Incumbent) -> Solution:
    method_cost = outcome.best.cost
    if incumbent.cost < (method_cost - TOLERANCE * abs(method_cost) if np.isfinite(method_cost) else method_cost):
        # An earlier step found a better assignment than the last one.
        best = ScoredAssignment(incumbent.assignment, incumbent.cost)
        outcome = replace(outcome, best=best, method=incumbent.method, proved=False)
    if not np.isfinite(outcome.best.cost):
        status = "infeasible" if outcome.proved else "unknown"
        bound = float("inf") if outcome.proved else outcome.bound
        return Solution((), float("inf"), bound, 0.0, status, outcome.method, incumbent.seconds)
    incumbent.raise_bound(outcome.bound)
    assignment = outcome.best.choices
    # Summed anew in the problem's own tables: costs of a search carry the rounding of reductions.
    cost = problem.cost(assignment)
    proved = outcome.proved or outcome.bound >= cost - TOLERANCE * abs(cost)
    peak = problem.peak(assignment)
    assert problem.within_limit(peak), (peak, problem.limit)
    bound = cost if proved else min(outcome.bound, cost)
    status = "optimal" if proved else "feasible"
    return Solution(assignment, cost, bound, peak, status, outcome.method, incumbent.seconds)


def _incumbent_solution(problem: Problem, incumbent: Incumbent) -> Solution:
    """Return the best assignment and bound of a search that was interrupted."""
    assignment = incumbent.assignment
    return Solution(
        assignment=assignment,
        cost=problem.cost(assignment),
        lower_bound=min(incumbent.lower_bound, incumbent.cost),
        peak=problem.peak(assignment),
        status="feasible",
        method=incumbent.method,
        seconds=incumbent.seconds,
        interrupted=True,
    )


def _eliminate(task: _SolveState) -> _MethodResult:
    optimum = _optimum(task.free)
    if optimum.choices and not task.fits(optimum.choices):
        peak = task.problem.peak(optimum.choices)
        raise SolverError(
            f"the memory limit of {task.problem.limit:.6g} binds: the optimum without it peaks at "
            f'{peak:.6g}. Elimination knows no memory; use method="auto" or "ilp"'
        )
    return _MethodResult(optimum, optimum.cost, True, "eliminate")


def _optimum(core: Core) -> ScoredAssignment:
    exact = eliminate(core)
    return score(core, exact.places, exact.cost)


def _alternate(task: _SolveState) -> _MethodResult:
    if task.large:
        return _solve_flat(task, finish=False)
    candidate = _search(task, task.budget.part(1.0))
    task.record("search", candidate, float("-inf"), 0)
    if candidate.choices and not task.fits(candidate.choices):
        return _solve_flat(task, finish=False)
    result = certify(task.folded, candidate, cap=None, budget=task.budget.part(1.0), rounds=1)
    # The assignment that the bound rounds may be cheaper, but exceed the limit.
    best = result.best if not result.best.choices or task.fits(result.best.choices) else candidate
    return _MethodResult(best, result.bound, result.rest is None and best is result.best, "alternate")


def _search(task: _SolveState, budget: Budget) -> ScoredAssignment:
    """Return a good assignment without the limit: alternation where strategies have labels, then large
    neighbourhoods."""
    candidate = task.start
    if not task.folded.feasible:
        return NO_ASSIGNMENT
    if not candidate.choices and task.problem.components is not None:
        candidate = alternate(task.free, task.problem.components, budget=budget)
    if not candidate.choices:
        candidate = _round_relaxation(task)
    return improve(task.folded, candidate, budget=budget) if candidate.choices else candidate


def _round_relaxation(task: _SolveState) -> ScoredAssignment:
    """Return a first assignment without a start, rounded from the relaxation.

    If that uses something forbidden, finite penalties lead the search out of it.
    """
    core = presolve(task.folded, effort=REDUCE)
    if not core.feasible:
        return NO_ASSIGNMENT
    bound = lower_bound(core, iterations=_ROUNDING_ITERATIONS, budget=task.budget.part(0.3))
    if bound.best.choices:
        return bound.best
    soft = soften(core)
    places = np.array([vector.argmin() for vector in soft.vectors], dtype=np.int64)
    candidate = improve(soft, score(soft, places), budget=task.budget.part(0.5))
    return score(core, core.contract(np.array(candidate.choices)))


def _ilp(task: _SolveState) -> _MethodResult:
    return _solve_integer_program(task, presolve(Core.of(task.problem), effort=REDUCE), task.budget)


def _auto(task: _SolveState) -> _MethodResult:
    if task.large:
        return _solve_flat(task, finish=True)
    bound = float("-inf")
    if task.moments is not None:
        core = presolve(Core.of(task.problem), effort=REDUCE)
        # The integer program knows memory, and is fast at this size; message passing would need prices first.
        if not core.feasible or core.cells <= _SMALL:
            result = _solve_integer_program(task, core, task.budget.part(0.3))
            task.record("integer program", result.best, result.bound, 0)
            if result.proved:
                return result
            bound = result.bound
    # If the optimum without the limit is within the limit, it is the optimum with it. If not, its bound still holds.
    free = _solve_without_limit(task)
    if task.fits(free.best.choices) if free.best.choices else free.proved:
        return free
    task.incumbent.raise_bound(max(bound, free.bound))
    return _solve_flat(task, finish=True)


def _solve_integer_program(
    task: _SolveState, core: Core, budget: Budget, hint: ScoredAssignment = NO_ASSIGNMENT
) -> _MethodResult:
    """Solve a core by the integer program, from a hint if there is one."""
    # numba takes a second to import, and most problems do without it.
    from autoshard.solver.ilp import solve_core

    if not core.feasible:
        return _MethodResult(NO_ASSIGNMENT, float("inf"), True, "ilp")
    start = core.contract(np.array(hint.choices)) if hint.choices else None
    # A smaller core may lack strategies of the hint, which then is no start.
    if start is not None and not np.isfinite(core.value(start)):
        start = None
    answer = solve_core(core, start=start, budget=budget, seed=task.seed)
    best = score(core, answer.places)
    return _MethodResult(best, min(answer.bound, best.cost), answer.proved, "ilp")


def _solve_flat(task: _SolveState, *, finish: bool) -> _MethodResult:
    """Solve by presolve, prices and neighbourhoods on flat arrays."""
    from autoshard.solver.flat.large_solver import LargeSolver

    incumbent = task.incumbent
    proved = LargeSolver(task.problem, incumbent, seed=task.seed, finish=finish).run()
    assignment = incumbent.assignment
    if not assignment:
        return _MethodResult(NO_ASSIGNMENT, incumbent.lower_bound, proved, "flat")
    best = ScoredAssignment(assignment, incumbent.cost)
    return _MethodResult(best, incumbent.lower_bound, proved, incumbent.method)


def _solve_without_limit(task: _SolveState) -> _MethodResult:
    """Return the optimum without the memory limit, or a good assignment and a bound."""
    try:
        candidate = _optimum(task.free)
        work = _WORK * task.free.cells
        phase = "without the limit, elimination" if task.moments else "elimination"
        task.record(phase, candidate, candidate.cost, work)
        return _MethodResult(candidate, candidate.cost, True, "eliminate")
    except WidthError:
        task.record("search", NO_ASSIGNMENT, float("-inf"), 0)
    candidate = _search(task, task.budget.part(0.4))
    task.record("search", candidate, float("-inf"), 0)
    if candidate.choices and not task.fits(candidate.choices):
        # The limit binds: a proof without it would take time from the search with prices.
        return _MethodResult(candidate, float("-inf"), False, "alternate")
    result = certify(task.folded, candidate, budget=task.budget.part(0.7))
    task.record("proof", result.best, result.bound, 0)
    if result.rest is None or task.budget.is_close(result.best.cost, result.bound):
        return _MethodResult(result.best, result.bound, result.rest is None, "alternate")
    # Too large for the integer program: other neighbourhoods may still help.
    if result.rest.cells > _INTEGER_CELLS:
        candidate = result.best
        if candidate.choices:
            candidate = improve(task.folded, candidate, seed=task.seed + 1, budget=task.budget.part(1.0))
        return _MethodResult(candidate, result.bound, False, "alternate")
    return _solve_rest(task, presolve(result.rest, effort=REDUCE), result.best, result.bound)


def _solve_rest(task: _SolveState, rest: Core, best: ScoredAssignment, bound: float) -> _MethodResult:
    """Solve the rest of a proof by the integer program; no dropped strategy is in a better assignment than `best`."""
    if not rest.feasible:
        return _MethodResult(best, best.cost, True, "ilp")
    if task.budget.is_over:
        return _MethodResult(best, bound, False, "ilp")
    result = _solve_integer_program(task, rest, task.budget, best)
    best = cheaper_of(best, result.best)
    return _MethodResult(best, max(bound, min(result.bound, best.cost)), result.proved, "ilp")


_METHODS: dict[str, Callable[[_SolveState], _MethodResult]] = {
    "auto": _auto,
    "eliminate": _eliminate,
    "alternate": _alternate,
    "ilp": _ilp,
}
