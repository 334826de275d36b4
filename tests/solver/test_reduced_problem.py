"""Reductions: an assignment of the smaller problem costs what it costs in the whole one; bounds hold for the whole."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import Problem
from autoshard.solver.reduced_problem import ReducedProblem
from tests.solver.problems import brute_force, small_problems


@given(problem=small_problems(memory=False), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_fewer_strategies_cost_what_they_cost_and_what_is_lost_bounds(problem: Problem, seed: int) -> None:
    random = np.random.default_rng(seed)
    kept = [np.flatnonzero(random.random(len(v)) < 0.6) for v in problem.costs]
    kept = [some if len(some) else np.zeros(1, dtype=np.int64) for some in kept]
    every = {choice: problem.cost(choice) for choice in product(*(range(len(v)) for v in problem.costs))}
    lacking = [cost for choice, cost in every.items() if any(c not in k for c, k in zip(choice, kept, strict=True))]
    whole = ReducedProblem.of(problem, range(problem.size))
    reduced = whole.restrict(kept, lost=min(lacking, default=np.inf))
    for choice in product(*(range(len(some)) for some in kept)):
        assert reduced.problem.cost(choice) == pytest.approx(every[reduced.solution(choice)])
    assert reduced.bound(brute_force(reduced.problem)) == pytest.approx(brute_force(problem))
    assert whole.restrict(kept).bound(1.0) == -np.inf
    assert reduced.solution(()) == ()


def test_tied_nodes_follow_and_lead_back() -> None:
    problem = Problem((np.arange(3.0),) * 4)
    tied = ReducedProblem(problem, Problem((np.arange(3.0),) * 2), range(2), -np.inf, follows=(0, 1, 1, 0))
    assert tied.solution((2, 1)) == (2, 1, 1, 2)
    assert tied.contract((2, 1, 1, 2)) == (2, 1)
    assert tied.bound(0.0) == -np.inf
