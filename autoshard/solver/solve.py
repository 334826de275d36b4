"""The solver's one door: a problem in, the best assignment with a bound out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from autoshard.solver.bound import lower_bound
from autoshard.solver.certify import TOLERANCE, certify, fix
from autoshard.solver.eliminate import WidthError, eliminate
from autoshard.solver.ilp import cells, solve_integer
from autoshard.solver.lagrange import Ascent, ascend, priced_bound
from autoshard.solver.moments import Moments
from autoshard.solver.network import Network
from autoshard.solver.problem import Array, Problem, SolverError
from autoshard.solver.reduce import reduce
from autoshard.solver.repair import cross, settle, windows
from autoshard.solver.search import NOTHING, Found, alternate, better, improve, softened
from autoshard.solver.tables import Tables

_log = logging.getLogger(__name__)

_ROUNDING_ITERATIONS = 30
"""Iterations of the relaxation where only its rounded assignment is wanted."""

_INTEGER_CELLS = 80_000
"""Entries of edge tables up to which what is left goes to the integer program."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The outcome of `solve`.

    Attributes:
        assignment: a strategy per node; empty where none is known.
        cost: of the assignment; `inf` without one.
        lower_bound: no feasible assignment costs less; `inf` where there is none.
        peak: bytes of the assignment at its worst moment.
        status: "optimal" (proved, up to a relative 1e-9), "feasible", "infeasible" (proved) or "unknown".
        method: what found it.
        seconds: wall-clock time of the solve.
    """

    assignment: tuple[int, ...]
    cost: float
    lower_bound: float
    peak: float
    status: str
    method: str
    seconds: float

    @property
    def gap(self) -> float:
        """(cost - lower bound) / |cost|; 0 if optimal, `inf` without an assignment."""
        if self.status == "optimal":
            return 0.0
        if not self.assignment:
            return float("inf")
        return (self.cost - self.lower_bound) / max(abs(self.cost), 1e-300)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A result before it is checked against the problem: `proved` closes it, found or not."""

    found: Found
    bound: float
    proved: bool
    method: str


def solve(
    problem: Problem, *, method: str = "auto", time_limit: float = 30.0, seed: int = 0, verbose: bool = False
) -> Solution:
    """Solves a problem.

    Args:
        problem: the problem.
        method: "auto" chooses: exact elimination, alternation with a proof, prices on memory, the integer program.
            "eliminate" is exact elimination alone. "alternate" solves one mesh axis after another, or large
            neighbourhoods where the problem has no `components`, with a bound but without the effort of a proof.
            "ilp" is the memory-constrained integer program of Rhino 4.2 and 4.4.
        time_limit: seconds. It shortens the search: what is returned is correct whenever it ends. Reading the
            problem and the first assignment are not interrupted.
        seed: of what is random. Same problem and seed, same solution, unless the time limit ends the search.
        verbose: whether to log progress at INFO level.

    Raises:
        SolverError: an unknown method; or "eliminate" where the tables would be too large, or where the memory
            limit binds.
    """
    methods: dict[str, Callable[[_Task], _Outcome]] = {
        "auto": _auto,
        "eliminate": _eliminate,
        "alternate": _alternate,
        "ilp": _ilp,
    }
    if method not in methods:
        raise SolverError(f'method "{method}" does not exist; choose one of {", ".join(methods)}')
    start = monotonic()
    task = _Task(problem, start + time_limit, seed, verbose)
    outcome = methods[method](task) if problem.size else _Outcome(Found({}, 0.0), 0.0, True, method)
    return _solution(problem, outcome, monotonic() - start)


class _Task:
    """A problem being solved: its networks, its moments, its clock."""

    def __init__(self, problem: Problem, deadline: float, seed: int, verbose: bool) -> None:
        self.problem = problem
        self.deadline = deadline
        self.seed = seed
        self.verbose = verbose
        self.network = Network.of(problem, Tables())
        self.moments = _binding_moments(problem)

    def core(self, *, dominance: bool) -> Network:
        """The network reduced as far as memory allows; with usages where a limit can bind."""
        network = Network.of(self.problem, self.network.tables, memory=self.moments is not None)
        return reduce(network, dominance=dominance)

    def fits(self, choices: dict[int, int]) -> bool:
        return self.moments is None or self.moments.respected(self.moments.loads(choices))

    def share(self, fraction: float) -> float:
        """The moment at which a fraction of the remaining time has passed."""
        now = monotonic()
        return now + fraction * max(self.deadline - now, 0.0)

    def log(self, what: str, found: Found, bound: float) -> None:
        if self.verbose:
            _log.info("%s: cost %.9g, lower bound %.9g", what, found.cost, bound)


def _binding_moments(problem: Problem) -> Moments | None:
    """The moments, or None where no assignment can pass the limit."""
    if problem.limit is None:
        return None
    moments = Moments.of(problem)
    return None if moments.respected(moments.most()) and problem.limit >= 0 else moments


def _solution(problem: Problem, outcome: _Outcome, seconds: float) -> Solution:
    if not np.isfinite(outcome.found.cost):
        status = "infeasible" if outcome.proved else "unknown"
        bound = float("inf") if outcome.proved else outcome.bound
        return Solution((), float("inf"), bound, 0.0, status, outcome.method, seconds)
    assignment = tuple(outcome.found.choices[node] for node in range(problem.size))
    cost = problem.cost(assignment)
    peak = problem.peak(assignment)
    assert problem.within_limit(peak), (peak, problem.limit)
    proved = outcome.proved or outcome.bound >= cost - TOLERANCE * abs(cost)
    bound = cost if proved else min(outcome.bound, cost)
    return Solution(assignment, cost, bound, peak, "optimal" if proved else "feasible", outcome.method, seconds)


def _eliminate(task: _Task) -> _Outcome:
    exact = eliminate(task.network)
    if exact.choices and not task.fits(exact.choices):
        raise SolverError(
            f"the memory limit of {task.problem.limit:.6g} binds: the optimum without it peaks at "
            f'{_peak(task, exact.choices):.6g}. Elimination knows no memory; use method="auto" or "ilp"'
        )
    return _Outcome(Found(exact.choices, exact.cost), exact.cost, True, "eliminate")


def _peak(task: _Task, choices: dict[int, int]) -> float:
    return task.problem.peak([choices[node] for node in range(task.problem.size)])


def _alternate(task: _Task) -> _Outcome:
    found = _search(task, task.deadline)
    if found.choices and not task.fits(found.choices):
        return _limited(task, found, float("-inf"), finish=False)
    result = certify(task.network, found, cap=1.0, deadline=task.deadline, rounds=1)
    # The bound's rounded assignment may be cheaper, and pass the limit.
    best = result.found if not result.found.choices or task.fits(result.found.choices) else found
    return _Outcome(best, result.bound, result.rest is None and best is result.found, "alternate")


def _search(task: _Task, deadline: float) -> Found:
    """A good assignment without the limit: alternation where strategies have labels, then large neighbourhoods."""
    found = NOTHING
    if task.problem.components is not None:
        found = alternate(task.network, task.problem.components, deadline=deadline)
    if not found.choices:
        found = _rounded(task)
    return improve(task.network, found, deadline=deadline) if found.choices else found


def _rounded(task: _Task) -> Found:
    """A first assignment where there is no better start: rounded from the relaxation or, where that uses something
    forbidden, led out of it by finite penalties."""
    core = reduce(task.network.copy())
    if not core.feasible:
        return NOTHING
    bound = lower_bound(core, iterations=_ROUNDING_ITERATIONS, deadline=task.share(0.3))
    if bound.choices:
        return Found(bound.choices, bound.cost)
    soft = softened(core)
    choices = {node: int(soft.labels[node][vector.argmin()]) for node, vector in soft.vectors.items()}
    found = improve(soft, Found(soft.expand(choices), soft.value(choices)), deadline=task.share(0.5))
    cost = core.value(found.choices)
    return Found(found.choices, cost) if np.isfinite(cost) else NOTHING


def _ilp(task: _Task) -> _Outcome:
    core = task.core(dominance=True)
    result = solve_integer(core, moments=task.moments, deadline=task.deadline, seed=task.seed)
    return _Outcome(result.found, result.bound, result.proved, "ilp")


def _auto(task: _Task) -> _Outcome:
    free = _unlimited(task)
    task.log(f"without the limit, {free.method}", free.found, free.bound)
    if not free.found.choices or task.fits(free.found.choices):
        return free
    return _limited(task, free.found, free.bound, finish=True)


def _unlimited(task: _Task) -> _Outcome:
    """The optimum without the memory limit, or a good assignment and a bound."""
    try:
        exact = eliminate(task.network)
        return _Outcome(Found(exact.choices, exact.cost), exact.cost, True, "eliminate")
    except WidthError as error:
        task.log(str(error), NOTHING, float("-inf"))
    found = _search(task, task.share(0.4))
    task.log("search", found, float("-inf"))
    if found.choices and not task.fits(found.choices):
        # The limit binds: a proof without it would take the time that the prices need.
        return _Outcome(found, float("-inf"), False, "alternate")
    result = certify(task.network, found, deadline=task.share(0.7))
    task.log("proof", result.found, result.bound)
    if result.rest is None:
        return _Outcome(result.found, result.bound, True, "alternate")
    if cells(result.rest) > _INTEGER_CELLS:
        found = result.found
        if found.choices:
            found = improve(task.network, found, cap=1e6, deadline=task.deadline)
        return _Outcome(found, result.bound, False, "alternate")
    return _closed(task, reduce(result.rest), None, result.found, result.bound)


def _closed(task: _Task, rest: Network, moments: Moments | None, best: Found, bound: float) -> _Outcome:
    """What is left, by the integer program; whatever was dropped is no better than `best`."""
    if not rest.feasible:
        return _Outcome(best, best.cost, True, "ilp")
    if monotonic() > task.deadline:
        return _Outcome(best, bound, False, "ilp")
    hint = best if best.choices and rest.positions(best.choices) is not None else NOTHING
    result = solve_integer(rest, moments=moments, hint=hint, deadline=task.deadline, seed=task.seed)
    best = better(best, result.found)
    return _Outcome(best, max(bound, min(result.bound, best.cost)), result.proved, "ilp")


def _limited(task: _Task, free: Found, bound: float, *, finish: bool) -> _Outcome:
    """Prices on memory, repair, and with `finish` the integer program for what the bound leaves."""
    moments = task.moments
    assert moments is not None
    # Dominated strategies stay: the assignment found without the limit may use one.
    core = task.core(dominance=False)
    if not core.feasible or not moments.respected(moments.least()):
        return _Outcome(NOTHING, float("inf"), True, "lagrange")
    ascent = ascend(core, moments, free, components=task.problem.components, deadline=task.share(0.5))
    best = _crossed(task, core, moments, ascent)
    if ascent.exact:
        bound = max(bound, ascent.value)
    task.log("prices", best, bound)
    relaxed = priced_bound(core, moments, ascent.prices, best.cost, task.share(0.3))
    bound = max(bound, min(relaxed.value, best.cost))
    if bound >= _below(best):
        return _Outcome(best, best.cost, bool(best.choices), "lagrange")
    if best.choices:
        best = windows(core, moments, ascent.prices, best, seed=task.seed, deadline=task.share(0.4))
        best = settle(core, moments, best, deadline=task.deadline)
    task.log("windows", best, bound)
    rest = reduce(fix(core, relaxed, _below(best)))
    if finish and cells(rest) <= _INTEGER_CELLS:
        return _closed(task, rest, moments, best, bound)
    return _Outcome(best, bound, not rest.feasible and bool(best.choices), "lagrange")


def _without_memory(core: Network) -> Network:
    network = core.copy()
    network.usages = {}
    return network


def _crossed(task: _Task, core: Network, moments: Moments, ascent: Ascent) -> Found:
    """The best assignment within the limit that the prices lead to, or one that uses little; `NOTHING` if neither."""
    best = cross(core, moments, ascent, deadline=task.share(0.4))
    if not best.choices:
        best = _smallest(core, moments)
    return settle(core, moments, best, deadline=task.deadline) if best.choices else NOTHING


def _smallest(core: Network, moments: Moments) -> Found:
    """The assignment that uses least memory summed over all moments, if that keeps the limit."""
    span = moments.prices(np.ones(moments.count))
    network = _without_memory(core)
    for node, usage in core.usages.items():
        held = np.where(np.isfinite(core.vectors[node]), usage * span[node], np.inf)
        network.vectors[node] = network.tables.intern(held)
        for other, table in core.edges[node].items():
            if node < other:
                allowed = network.tables.intern(_support(table))
                network.edges[node][other] = allowed
                network.edges[other][node] = network.tables.transpose(allowed)
    try:
        exact = eliminate(network)
    except WidthError:
        return NOTHING
    if not exact.choices or not moments.respected(moments.loads(exact.choices)):
        return NOTHING
    return Found(exact.choices, core.value(exact.choices))


def _support(table: Array) -> Array:
    """Zero where a pair is allowed."""
    return np.where(np.isfinite(table), 0.0, np.inf)


def _below(best: Found) -> float:
    return best.cost - TOLERANCE * abs(best.cost) if best.choices else float("inf")
