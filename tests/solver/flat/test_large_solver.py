from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem, solve
from autoshard.solver.core import Core
from autoshard.solver.flat.descent import Descent
from autoshard.solver.flat.large_solver import CoreSearch, LargeSolver
from autoshard.solver.ilp import solve_core
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.presolve import presolve
from autoshard.solver.solver_budget import Budget
from tests.solver.problems import brute_force, small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=15, deadline=None)
def test_small_problems_are_solved_and_proved(problem: Problem) -> None:
    best = brute_force(problem)
    found = Incumbent(Budget.of_seconds(60.0))
    assert LargeSolver(problem, found).run()
    assert found.cost == pytest.approx(best)
    if np.isfinite(best):
        assert problem.feasible(found.assignment)
        assert found.lower_bound <= best + 1e-9 * max(abs(best), 1.0)
    else:
        assert found.assignment == ()


@pytest.mark.parametrize(("nodes", "fraction"), [(30, 0.2), (40, 0.5)])
def test_middling_problems_equal_the_integer_program(nodes: int, fraction: float) -> None:
    problem = with_memory(two_axes(nodes, labels=3, seed=nodes), fraction)
    oracle = solve(problem, method="ilp", time_limit=60.0)
    assert oracle.status == "optimal"
    found = Incumbent(Budget.of_seconds(60.0))
    assert LargeSolver(problem, found).run()
    assert found.cost == pytest.approx(oracle.cost, rel=1e-9)


def test_without_a_limit_too() -> None:
    problem = two_axes(30, labels=3)
    found = Incumbent(Budget.of_seconds(60.0))
    assert LargeSolver(problem, found).run()
    assert found.cost == pytest.approx(solve(problem).cost, rel=1e-9)


def test_what_only_the_integer_program_can_refute_is_infeasible() -> None:
    """Four nodes must all differ, and there are three strategies; memory keeps the nodes from elimination."""
    differ = np.where(np.eye(3, dtype=bool), np.inf, 0.0)
    edges = tuple(Edge(one, other, differ) for one, other in combinations(range(4), 2))
    usages = tuple(np.array([1.0, 2.0, 3.0]) for _ in range(4))
    lives = ((0, 4), (1, 5), (2, 6), (3, 7))
    found = Incumbent(Budget.of_seconds(60.0))
    assert LargeSolver(Problem((np.zeros(3),) * 4, edges, usages, lives, 9.0), found).run()
    assert found.assignment == ()


def test_what_descents_ended_at_is_united() -> None:
    """Of the leanest choice and a good one, the union holds every mixture: the best of them is no worse than either."""
    problem = with_memory(two_axes(40, labels=3, seed=3), 0.3)
    core = presolve(Core.of(problem))
    front = CoreSearch(LargeSolver(problem, Incumbent(Budget(work_limit=10**9))), core, np.zeros(len(core.base)))
    good = solve_core(core).places
    assert good is not None
    use = np.zeros(len(core.cost))
    for item, node in enumerate(core.item_node.tolist()):
        begin, size = int(core.usage_start[item]), int(core.size[node])
        use[core.offset[node] : core.offset[node + 1]] += core.usage[begin : begin + size]
    ends = zip(core.offset[:-1], core.offset[1:], strict=True)
    lean = np.array([use[low:high].argmin() for low, high in ends], dtype=np.int64)
    front.descent = Descent(core, front.view, core.value(good), 0)
    front.descent.begin(lean, np.zeros(len(core.base)))
    assert core.value(good) < front.descent.cost < np.inf
    front.ends.append(good)
    front._search_union(10**6)
    assert front.descent.best is not None
    assert front.descent.cost == pytest.approx(core.value(good), rel=1e-9)
    assert problem.feasible(core.expand(front.descent.best).tolist())
