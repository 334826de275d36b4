"""Linear and integer programs as arrays, solved by OR-Tools."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread, current_thread, main_thread
from typing import Any

import numpy as np

from autoshard.solver.problem import Array, SolverError

_GAP = 1e-9
"""Relative gap at which an integer program counts as solved."""


@dataclass(slots=True)
class LinearProgram:
    """Minimise costs · x within bounds and rows; built row by row.

    Attributes:
        costs, lower, upper, integer: one entry per variable.
        rows: (variables, coefficients, least, most) of each row.
    """

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[Any, Any, float, float]] = field(default_factory=list)

    def add_variables(self, costs: Array, *, lower: float = 0.0, upper: float = 1.0, integer: bool = False) -> range:
        """Add variables and return their numbers."""
        start = len(self.costs)
        self.costs += costs.tolist()
        self.lower += [lower] * len(costs)
        self.upper += [upper] * len(costs)
        self.integer += [integer] * len(costs)
        return range(start, start + len(costs))

    def add_row(self, variables: Any, coefficients: Any, least: float, most: float) -> None:
        """Add least <= coefficients · variables <= most."""
        self.rows.append((variables, coefficients, least, most))


@dataclass(frozen=True, slots=True)
class LinearSolution:
    """The result of a backend.

    Attributes:
        values: of the variables; None where no solution was found.
        bound: no solution costs less.
        optimal: True if the values are proved best.
        infeasible: True if it is proved that there is no solution.
        nodes: number of solved nodes of the search tree.
    """

    values: Array | None
    bound: float
    optimal: bool
    infeasible: bool
    nodes: int


def minimise(
    program: LinearProgram,
    *,
    time_limit: float,
    seed: int = 0,
    hint: Array | None = None,
    node_limit: int | None = None,
) -> LinearSolution:
    """Solve a program: HiGHS where there are integers, GLOP otherwise.

    Args:
        program: the program.
        time_limit: seconds.
        seed: of the backend; equal seeds give equal results, unless the time ends first.
        hint: values of all variables of a known solution.
        node_limit: most nodes of the search tree; None for no limit.

    Raises:
        SolverError: OR-Tools is not installed, or the backend failed.
    """
    try:
        from ortools.math_opt.python import mathopt
    except ImportError as error:
        raise SolverError("OR-Tools can't be imported; install ortools, or use a method that does without") from error
    model = mathopt.Model.from_model_proto(_proto(program))
    mixed = any(program.integer)
    parameters = mathopt.SolveParameters(time_limit=timedelta(seconds=max(time_limit, 0.01)))
    settings = mathopt.ModelSolveParameters()
    if mixed:
        parameters.random_seed = seed
        # With several threads, the result would depend on their timing.
        parameters.highs.string_options["parallel"] = "off"
        parameters.relative_gap_tolerance = _GAP
        parameters.node_limit = node_limit
        if hint is not None:
            values = {model.get_variable(index): float(value) for index, value in enumerate(hint)}
            settings.solution_hints = [mathopt.SolutionHint(variable_values=values)]
    backend = mathopt.SolverType.HIGHS if mixed else mathopt.SolverType.GLOP
    try:
        result = _run_interruptible(lambda: mathopt.solve(model, backend, params=parameters, model_params=settings))
    except (RuntimeError, ValueError, AttributeError) as error:
        # Some versions of OR-Tools raise an AttributeError while they translate the failure of a backend.
        raise SolverError(
            "OR-Tools could not solve the program, and its own error above says why; use a method that does without"
        ) from error
    return _read_solution(mathopt, model, result)


def _run_interruptible(work: Callable[[], Any]) -> Any:
    """Return the result of `work`; Ctrl-C interrupts the wait."""
    if current_thread() is not main_thread():
        return work()
    # The backend ignores signals. In a separate thread it runs until its time limit, while this thread returns.
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            # Any exception, Ctrl-C included, is raised again in the calling thread.
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    return outcome.result()


def _read_solution(mathopt: Any, model: Any, result: Any) -> LinearSolution:
    reason = result.termination.reason
    values = None
    if result.has_primal_feasible_solution():
        values = np.array(result.variable_values(list(model.variables())))
    return LinearSolution(
        values=values,
        bound=float(result.termination.objective_bounds.dual_bound),
        optimal=reason == mathopt.TerminationReason.OPTIMAL,
        infeasible=reason == mathopt.TerminationReason.INFEASIBLE,
        nodes=result.solve_stats.node_count,
    )


def _proto(program: LinearProgram) -> Any:
    """Return the program in OR-Tools' own format."""
    # Filling the message is much faster than adding terms one by one.
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(len(program.costs)))
    proto.variables.lower_bounds.extend(program.lower)
    proto.variables.upper_bounds.extend(program.upper)
    proto.variables.integers.extend(program.integer)
    used = np.flatnonzero(program.costs)
    proto.objective.linear_coefficients.ids.extend(used.tolist())
    proto.objective.linear_coefficients.values.extend(np.asarray(program.costs)[used].tolist())
    matrix = proto.linear_constraint_matrix
    for index, (variables, coefficients, least, most) in enumerate(program.rows):
        proto.linear_constraints.ids.append(index)
        proto.linear_constraints.lower_bounds.append(least)
        proto.linear_constraints.upper_bounds.append(most)
        # The format requires the columns of a row in ascending order.
        order = np.argsort(variables)
        matrix.row_ids.extend([index] * len(order))
        matrix.column_ids.extend(np.asarray(variables)[order].tolist())
        matrix.coefficients.extend(np.asarray(coefficients, dtype=float)[order].tolist())
    return proto
