"""The entry of the solver: from a problem to the best assignment, with a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

_WORK = 100
"""Units of work of exact elimination per table entry."""

_LARGE = 10_000
"""Least nodes of a problem without `components` that is solved by `LargeSolver` at once."""


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
    proof: bool = True,
) -> Solution:
    """Solve a problem.

    Args:
        problem: the problem.
        method: "auto" chooses among all methods: exact elimination, alternation with a proof, and, under a memory
            limit, presolve with prices and large neighbourhoods; and the integer program where the remaining core is
            small and the budget allows it. "eliminate" is only exact elimination. "alternate" solves one mesh axis
            after another, or large neighbourhoods without `components`, with a bound but without the effort of a proof.
            "ilp" is the memory-constrained integer program of Rhino 4.2 and 4.4.
        time_limit: seconds. It shortens the search; the result is correct whenever the search ends. Reading the problem
            and the first assignment are not interrupted.
        work_limit: units of work, about one table entry read, some 10**8 per second; checked between the steps of the
            search. Solves that end by it give the same result on machines of any speed.
        gap: relative difference of the best cost and the bound at which the search ends; checked between its steps. 0
            for a proof.
        seed: of the random numbers. The same problem and seed give the same solution, unless the time limit ends the
            search.
        progress: called with the best cost and the bound when they move.
        start: a known assignment of finite cost. If no memory limit binds, "auto" and "alternate" improve it instead of
            searching for one; a good one makes the proof shorter. It has no other effect.
        proof: False if "alternate" need not find a bound, which takes most of its time.

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
    incumbent, proved = Incumbent(budget, progress), False
    if not problem.size:
        return Solution((), 0.0, 0.0, 0.0, "optimal", method, incumbent.seconds)
    with budget.interruptible():
        proved = _METHODS[method](_SolveState(problem, incumbent, seed, initial, proof))
    if budget.interrupted and not incumbent.assignment:
        raise KeyboardInterrupt
    return _solution(problem, incumbent, method, proved=proved)


def _solution(problem: Problem, incumbent: Incumbent, method: str, *, proved: bool) -> Solution:
    """Return the best results of a search; `proved` if they are final, with or without an assignment."""
    bound = incumbent.lower_bound
    if not np.isfinite(incumbent.cost):
        status, bound = ("infeasible", float("inf")) if proved else ("unknown", bound)
        return Solution((), float("inf"), bound, 0.0, status, method, incumbent.seconds)
    assignment = incumbent.assignment
    # Recompute from the problem's tables, since costs of a search have the rounding of reductions.
    cost = problem.cost(assignment)
    proved = proved or bound >= cost - TOLERANCE * abs(cost)
    peak = problem.peak(assignment)
    assert problem.within_limit(peak), (peak, problem.limit)
    return Solution(
        assignment=assignment,
        cost=cost,
        lower_bound=cost if proved else min(bound, cost),
        peak=peak,
        status="optimal" if proved else "feasible",
        method=incumbent.method,
        seconds=incumbent.seconds,
        interrupted=incumbent.budget.interrupted,
    )


class _SolveState:
    """A problem during its solve, with its best results and the start assignment."""

    def __init__(self, problem: Problem, incumbent: Incumbent, seed: int, start: ScoredAssignment, proof: bool) -> None:
        self.problem = problem
        self.incumbent = incumbent
        self.budget = incumbent.budget
        self.seed = seed
        self.start = start
        self.proof = proof
        self.limited = _is_limited(problem)
        self.large = problem.size >= _LARGE and problem.components is None

    @cached_property
    def free(self) -> Core:
        """The problem without its limit."""
        return Core.of(self.problem, memory=False)

    @cached_property
    def folded(self) -> Core:
        """The problem without its limit, presolved without loss of an allowed choice."""
        return presolve(self.free, effort=FOLD)

    def fits(self, choices: Sequence[int]) -> bool:
        return not self.limited or self.problem.within_limit(self.problem.peak(choices))

    def record(
        self, method: str, candidate: ScoredAssignment, bound: float = float("-inf"), *, phase: str, work: float = 0.0
    ) -> None:
        """Record an assignment, if it is within the limit, a bound of every assignment, and the work of a step."""
        if np.isfinite(candidate.cost) and self.fits(candidate.choices):
            self.incumbent.offer(candidate.cost, lambda: candidate.choices, method)
        self.incumbent.raise_bound(bound)
        self.budget.spend(work)
        self.incumbent.report(phase)


def _is_limited(problem: Problem) -> bool:
    """Return True if some assignment exceeds the limit."""
    if problem.limit is None:
        return False
    assert problem.usages is not None
    most = Moments.of(problem).loads(np.array([usage.max() for usage in problem.usages]))
    return not problem.within_limit(float(most.max(initial=0.0)))


def _eliminate(task: _SolveState) -> bool:
    optimum = _optimum(task.free)
    if optimum.choices and not task.fits(optimum.choices):
        peak = task.problem.peak(optimum.choices)
        raise SolverError(
            f"the memory limit of {task.problem.limit:.6g} binds: the optimum without it peaks at "
            f'{peak:.6g}. Elimination knows no memory; use method="auto" or "ilp"'
        )
    task.record("eliminate", optimum, optimum.cost, phase="elimination")
    return True


def _optimum(core: Core) -> ScoredAssignment:
    exact = eliminate(core)
    return score(core, exact.places, exact.cost)


def _alternate(task: _SolveState) -> bool:
    if task.large:
        return _solve_flat(task, finish=False)
    candidate = _search(task, task.budget.part(1.0))
    task.record("alternate", candidate, phase="search")
    if candidate.choices and not task.fits(candidate.choices):
        return _solve_flat(task, finish=False)
    if not task.proof:
        return False
    result = certify(task.folded, candidate, cap=None, budget=task.budget.part(1.0), rounds=1)
    # The rounded assignment of the bound may be cheaper, but exceed the limit.
    task.record("alternate", result.best, result.bound, phase="proof")
    return result.rest is None and (not result.best.choices or task.fits(result.best.choices))


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

    If it uses something forbidden, finite penalties guide the search out of it.
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


def _ilp(task: _SolveState) -> bool:
    core = presolve(Core.of(task.problem), effort=REDUCE)
    return _solve_integer_program(task, core, task.budget)[1]


def _auto(task: _SolveState) -> bool:
    if task.large:
        return _solve_flat(task, finish=True)
    # If the optimum without the limit is within the limit, it is the optimum with it. If not, its bound still holds.
    free, proved = _solve_without_limit(task)
    if task.fits(free.choices) if free.choices else proved:
        return proved
    return _solve_flat(task, finish=True)


def _solve_integer_program(
    task: _SolveState, core: Core, budget: Budget, known: ScoredAssignment = NO_ASSIGNMENT
) -> tuple[ScoredAssignment, bool]:
    """Solve a core by the integer program; return the best assignment, and True if that is final.

    No assignment that the core lacks is better than the known one.
    """
    # numba takes a second to import, and most problems do not need it.
    from autoshard.solver.ilp import CoreSolution, solve_core

    answer = CoreSolution(None, float("inf"), True)
    if core.feasible:
        start = core.contract(np.array(known.choices)) if known.choices else None
        # A smaller core may lack strategies of the known assignment, which then is no start.
        if start is not None and not np.isfinite(core.value(start)):
            start = None
        answer = solve_core(core, start=start, budget=budget, seed=task.seed)
    best = cheaper_of(known, score(core, answer.places))
    task.record("ilp", best, min(answer.bound, best.cost), phase="integer program")
    return best, answer.proved


def _solve_flat(task: _SolveState, *, finish: bool) -> bool:
    """Solve by presolve, prices and neighbourhoods on flat arrays."""
    from autoshard.solver.flat.large_solver import LargeSolver

    return LargeSolver(task.problem, task.incumbent, seed=task.seed, finish=finish).run()


def _solve_without_limit(task: _SolveState) -> tuple[ScoredAssignment, bool]:
    """Return the best assignment without the memory limit, and True if it is the optimum."""
    try:
        candidate = _optimum(task.free)
        phase = "without the limit, elimination" if task.limited else "elimination"
        task.record("eliminate", candidate, candidate.cost, phase=phase, work=_WORK * task.free.cells)
        return candidate, True
    except WidthError:
        task.incumbent.report("search")
    candidate = _search(task, task.budget.part(0.4))
    task.record("alternate", candidate, phase="search")
    if candidate.choices and not task.fits(candidate.choices):
        # The limit binds: spend no time on a proof without it.
        return candidate, False
    result = certify(task.folded, candidate, budget=task.budget.part(0.7))
    best = result.best
    task.record("alternate", best, result.bound, phase="proof")
    if result.rest is None or task.budget.is_close(best.cost, result.bound):
        return best, result.rest is None
    # Too large for the integer program: other neighbourhoods may still help.
    from autoshard.solver.ilp import is_small

    if not is_small(result.rest, task.budget):
        if best.choices:
            best = improve(task.folded, best, seed=task.seed + 1, budget=task.budget.part(1.0))
            task.record("alternate", best, phase="search")
        return best, False
    rest = presolve(result.rest, effort=REDUCE)
    if rest.feasible and task.budget.is_over:
        return best, False
    return _solve_integer_program(task, rest, task.budget, best)


_METHODS: dict[str, Callable[[_SolveState], bool]] = {
    "auto": _auto,
    "eliminate": _eliminate,
    "alternate": _alternate,
    "ilp": _ilp,
}
