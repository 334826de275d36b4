"""The integer program and the dynamic program over an order, against every assignment of small graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from autoshard.pipeline.graph.stage_problem import Assignment, StageDevice, StageProblem
from autoshard.pipeline.graph.stage_solvers import StageProgram, cut_order, is_linear, stage_bounds
from autoshard.solver.linear import minimise
from tests.pipeline.random_graphs import (
    assignments,
    chain,
    chains,
    evaluate_assignment,
    graphs,
    problems,
    smallest_objective,
)


@given(problems(graphs()))
@settings(max_examples=60, deadline=None)
def test_the_integer_program_finds_the_best_of_all_assignments(problem: StageProblem) -> None:
    expected = smallest_objective(problem)
    program = StageProgram(problem)
    found, proved = program.solve(time_limit=20)
    assert proved
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert evaluate_assignment(problem, found) == pytest.approx(expected, abs=1e-6)
    assert problem.totals(found).objective == pytest.approx(expected, abs=1e-6)
    bound = minimise(program.program, time_limit=20).bound / program.scale
    assert bound == pytest.approx(expected, abs=1e-6)


@given(problems(chains()))
@settings(max_examples=60, deadline=None)
def test_on_chains_the_order_is_exact(problem: StageProblem) -> None:
    assert is_linear(problem)
    expected = smallest_objective(problem)
    found = cut_order(problem)
    assert (found is None) == (expected is None)
    if found is not None:
        assert evaluate_assignment(problem, found) == pytest.approx(expected)
        answer, _ = StageProgram(problem).solve(time_limit=20, start=found)
        assert answer is not None
        assert problem.totals(answer).objective == pytest.approx(expected, abs=1e-6)


@given(problems(graphs()))
@settings(max_examples=60, deadline=None)
def test_what_the_order_gives_is_an_assignment_priced_right(problem: StageProblem) -> None:
    found = cut_order(problem, "balance")
    assume(found is not None)
    assert found is not None
    account = problem.totals(found)
    assert problem.fits_memory(account)
    assert account.objective == pytest.approx(evaluate_assignment(replace(problem, tolerance=1e9), found))
    assert all(found.stage[value.source] <= found.stage[user] for value in problem.graph.values for user in value.users)


@given(problems(graphs()))
@settings(max_examples=60, deadline=None)
def test_bounds_exclude_no_assignment_within_the_tolerance(problem: StageProblem) -> None:
    bounds = stage_bounds(problem)
    for stage in assignments(problem.graph, problem.stages):
        if problem.imbalance(problem.totals(Assignment(stage))) <= problem.tolerance:
            assert bounds is not None
            assert (bounds[0] <= stage).all()
            assert (stage <= bounds[1]).all()


def test_bounds_of_a_chain_leave_little() -> None:
    problem = StageProblem(chain([1.0] * 8, [1] * 7), (StageDevice(1.0),) * 4, (1,) * 4, 0.1)
    bounds = stage_bounds(problem)
    assert bounds is not None
    first, last = bounds
    assert first.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert last.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
