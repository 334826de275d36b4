from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem, SolverError, solve
from tests.solver.problems import brute_force, layered_problem, small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("method", ["auto", "ilp"])
def test_exact_methods_equal_brute_force(method: str, problem: Problem) -> None:
    best = brute_force(problem)
    solution = solve(problem, method=method)
    if best == np.inf:
        assert solution.status == "infeasible"
        assert solution.assignment == ()
        return
    assert solution.status == "optimal"
    assert np.isclose(solution.cost, best, rtol=1e-9)
    assert solution.lower_bound <= best + 1e-9 * abs(best)
    assert solution.gap == 0.0
    assert problem.feasible(solution.assignment)
    assert solution.peak == problem.peak(solution.assignment)


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_elimination_equals_brute_force_or_says_that_the_limit_binds(problem: Problem) -> None:
    best = brute_force(problem)
    free = solve(replace(problem, limit=None), method="eliminate")
    if free.assignment and not problem.feasible(free.assignment):
        with pytest.raises(SolverError, match="knows no memory"):
            solve(problem, method="eliminate")
        return
    solution = solve(problem, method="eliminate")
    assert solution.cost == best
    assert solution.status == ("optimal" if np.isfinite(best) else "infeasible")


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_alternation_is_feasible_and_bounded(problem: Problem) -> None:
    best = brute_force(problem)
    solution = solve(problem, method="alternate")
    assert solution.lower_bound <= best + 1e-9 * abs(best)
    assert solution.cost >= best - 1e-9
    if solution.assignment:
        assert problem.feasible(solution.assignment)
    if solution.status == "optimal":
        assert np.isclose(solution.cost, best)
    if solution.status == "infeasible":
        assert best == np.inf


def ladder(rungs: int, strategies: int) -> Problem:
    random = np.random.default_rng(1)
    pairs = [(2 * rung, 2 * rung + 1) for rung in range(rungs)]
    pairs += [(node, node + 2) for node in range(2 * rungs - 2)]
    edges = tuple(Edge(a, b, random.random((strategies, strategies))) for a, b in pairs)
    return Problem(tuple(random.random((2 * rungs, strategies))), edges)


def tree(nodes: int, strategies: int) -> Problem:
    random = np.random.default_rng(2)
    edges = (Edge(int(random.integers(n)), n, random.random((strategies, strategies))) for n in range(1, nodes))
    return Problem(tuple(random.random((nodes, strategies))), tuple(edges))


@pytest.mark.parametrize(
    "problem", [ladder(20, 4), tree(60, 5), layered_problem(1, per_layer=60), two_axes(15, labels=3)]
)
def test_elimination_and_the_integer_program_agree(problem: Problem) -> None:
    exact, integer = solve(problem, method="eliminate"), solve(problem, method="ilp")
    assert exact.status == integer.status == "optimal"
    assert np.isclose(exact.cost, integer.cost, rtol=1e-9)


def test_alternation_comes_near_the_integer_program_on_two_axes() -> None:
    problem = two_axes(25, labels=5)
    best = solve(problem, method="ilp", time_limit=60.0)
    result = solve(problem, method="alternate")
    assert best.status == "optimal"
    assert best.cost * (1 - 1e-9) <= result.cost <= 1.1 * best.cost
    assert result.lower_bound <= best.cost * (1 + 1e-9)


def test_repeated_layers_are_solved_exactly() -> None:
    problem = layered_problem(28)
    assert problem.size > 3000
    solution = solve(problem, method="eliminate")
    assert solution.status == "optimal"
    assert np.isclose(solution.cost, problem.cost(solution.assignment))


def test_the_same_input_gives_the_same_output() -> None:
    problem = with_memory(two_axes(20, labels=3), 0.4)
    first, second = solve(problem), solve(problem)
    assert first.assignment == second.assignment
    assert first.lower_bound == second.lower_bound


def test_a_time_limit_shortens_the_search_and_not_the_correctness() -> None:
    problem = two_axes(60, density=0.9)
    hurried, full = solve(problem, time_limit=0.0, method="alternate"), solve(problem)
    assert full.status == "optimal"
    assert np.isclose(problem.cost(hurried.assignment), hurried.cost)
    assert hurried.lower_bound <= full.cost <= hurried.cost


@pytest.mark.parametrize("method", ["auto", "eliminate", "alternate"])
def test_large_problems_without_mesh_axes_are_solved_by_every_method(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = layered_problem(1, per_layer=60)
    expected = solve(problem, method="eliminate")
    monkeypatch.setattr(sys.modules["autoshard.solver.solve"], "_LARGE", 10)
    solution = solve(problem, method=method, time_limit=20.0)
    assert np.isclose(solution.cost, expected.cost, rtol=1e-9)
    assert solution.lower_bound <= expected.cost * (1 + 1e-9)


@pytest.mark.parametrize("method", ["auto", "alternate"])
def test_a_start_is_never_made_worse(method: str) -> None:
    problem = two_axes(40)
    best = solve(problem)
    for start in (best.assignment, tuple(int(vector.argmin()) for vector in problem.costs)):
        result = solve(problem, method=method, start=start)
        assert result.cost <= problem.cost(start) * (1 + 1e-12)
        assert result.lower_bound <= best.cost * (1 + 1e-9)
    assert solve(problem, method=method, start=best.assignment).cost == pytest.approx(best.cost)


def test_a_start_that_is_none_is_refused() -> None:
    problem = Problem((np.array([0.0, np.inf]), np.zeros(2)), (Edge(0, 1, np.zeros((2, 2))),))
    with pytest.raises(SolverError, match="forbidden strategy"):
        solve(problem, start=(1, 0))
    with pytest.raises(SolverError, match="1 entries"):
        solve(problem, start=(0,))


def test_nothing_to_choose() -> None:
    solution = solve(Problem(()))
    assert solution.status == "optimal"
    assert solution.assignment == ()
    assert solution.cost == 0.0


@pytest.mark.parametrize("method", ["auto", "eliminate", "alternate", "ilp"])
def test_forbidden_everywhere_is_infeasible(method: str) -> None:
    closed = np.full((2, 2), np.inf)
    solution = solve(Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, closed),)), method=method)
    assert solution.status == "infeasible"


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(SolverError, match='method "magic" does not exist; choose one of auto'):
        solve(layered_problem(1), method="magic")
