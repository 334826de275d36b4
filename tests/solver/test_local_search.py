from __future__ import annotations

import numpy as np
import pytest

from autoshard.solver import Edge, Problem, solve
from autoshard.solver.bound import certify, lower_bound
from autoshard.solver.core import Core
from autoshard.solver.local_search import NO_ASSIGNMENT, ScoredAssignment, alternate, cheaper_of, improve, soften
from autoshard.solver.presolve import FOLD, presolve
from autoshard.solver.solver_budget import Budget
from tests.solver.problems import layered_problem, two_axes


@pytest.mark.parametrize("seed", range(3))
def test_alternation_comes_near_the_optimum(seed: int) -> None:
    problem = two_axes(40, seed=seed)
    core = Core.of(problem)
    found_result = alternate(core, problem.components)
    best = solve(problem).cost
    assert np.isclose(found_result.cost, problem.cost(found_result.choices))
    assert best <= found_result.cost * (1 + 1e-12)
    assert found_result.cost <= best * 1.1


def test_alternation_never_worsens_its_start() -> None:
    problem = two_axes(30)
    core = Core.of(problem)
    optimum = solve(problem)
    start = ScoredAssignment(optimum.assignment, optimum.cost)
    assert np.isclose(alternate(core, problem.components, start=start).cost, optimum.cost)


def test_improvement_is_monotone_and_deterministic() -> None:
    problem = two_axes(60, density=0.9)
    core = presolve(Core.of(problem), effort=FOLD)
    start = (0,) * 60
    first = ScoredAssignment(start, problem.cost(start))
    found = [improve(core, first, patience=patience) for patience in (0, 1, 6)]
    costs = [result.cost for result in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] <= first.cost
    assert solve(problem).cost <= costs[-1] < 0.05 * first.cost
    assert np.isclose(problem.cost(found[-1].choices), costs[-1])
    assert improve(core, first).choices == found[-1].choices


def test_nothing_is_cheaper_than_a_core_that_has_no_nodes() -> None:
    problem = layered_problem(1, per_layer=4)
    core = presolve(Core.of(problem), effort=FOLD)
    assert core.nodes == 0
    start = ScoredAssignment((0,) * 4, problem.cost((0,) * 4))
    assert improve(core, start).cost == core.constant


def test_a_proof_without_elimination_of_the_whole() -> None:
    """The whole is too wide for the cap; dropping strategies by their floors makes it narrow enough."""
    problem = two_axes(100)
    core = Core.of(problem)
    folded = presolve(core, effort=FOLD)
    found_result = improve(folded, alternate(core, problem.components))
    result = certify(folded, found_result, cap=1e5)
    assert result.rest is None
    assert np.isclose(result.best.cost, solve(problem).cost, rtol=1e-8)
    assert result.bound == result.best.cost


def test_the_cheaper_is_kept_and_the_first_of_equals() -> None:
    first, second = ScoredAssignment((1,), 2.0), ScoredAssignment((0,), 2.0)
    assert cheaper_of(first, second) is first
    assert cheaper_of(NO_ASSIGNMENT, first) is first
    assert cheaper_of(first, ScoredAssignment((2,), 1.0)).cost == 1.0


def test_penalties_lead_out_of_what_is_forbidden() -> None:
    """All nodes must differ: most assignments are forbidden, the first one entirely."""
    random = np.random.default_rng(3)
    differ = np.where(np.eye(7, dtype=bool), np.inf, 0.0)
    edges = tuple(Edge(a, b, differ) for a in range(7) for b in range(a))
    problem = Problem(tuple(random.random((7, 7))), edges)
    core = Core.of(problem)
    start = (0,) * 7
    assert problem.cost(start) == np.inf
    soft = soften(core)
    found_result = improve(soft, ScoredAssignment(start, soft.value(np.array(start))))
    assert sorted(found_result.choices) == list(range(7))
    assert np.isclose(problem.cost(found_result.choices), found_result.cost)


def test_work_ends_a_search_between_its_steps() -> None:
    """Less work than one step is counted as: each loop ends after the step that it is in."""
    problem = two_axes(600, labels=3, density=0.9)
    core = Core.of(problem)
    start = (0,) * 600
    first = ScoredAssignment(start, problem.cost(start))
    budget = Budget(work_limit=1)
    whole = improve(presolve(core, effort=FOLD), first)
    assert whole.cost < improve(presolve(core, effort=FOLD), first, budget=budget).cost < first.cost
    assert budget.work < 0
    assert lower_bound(presolve(core), budget=Budget(work_limit=1)).iterations == 1
    budget = Budget(work_limit=1)
    assert np.isfinite(alternate(core, problem.components, budget=budget).cost)
    assert budget.work > -20 * core.cells
