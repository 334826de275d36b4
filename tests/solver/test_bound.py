from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings

from autoshard.solver import Problem
from autoshard.solver.bound import lower_bound
from autoshard.solver.core import Core
from autoshard.solver.eliminate import eliminate
from autoshard.solver.presolve import FOLD, REDUCE, presolve
from tests.solver.problems import layered_problem, small_problems, two_axes


@given(problem=small_problems(memory=False))
@settings(max_examples=100, deadline=None)
def test_bounds_and_floors_are_true(problem: Problem) -> None:
    core = presolve(Core.of(problem), effort=FOLD)
    if not core.feasible:
        return
    every = list(product(*(range(len(vector)) for vector in problem.costs)))
    costs = np.array([problem.cost(choice) for choice in every])
    for bound in (lower_bound(core), lower_bound(core, iterations=1)):
        assert bound.value <= costs.min() + 1e-9
        for floor, node, strategy in zip(bound.floors, *core.origins(), strict=True):
            using = [cost for cost, choice in zip(costs, every, strict=True) if choice[node] == strategy]
            assert floor <= min(using) + 1e-9
        if bound.best.choices:
            assert np.isclose(problem.cost(bound.best.choices), bound.best.cost)


def test_the_bound_is_close_on_a_long_problem() -> None:
    core = Core.of(layered_problem(3))
    bound = lower_bound(presolve(core, effort=REDUCE))
    best = eliminate(core).cost
    assert bound.value <= best <= bound.value * (1 + 1e-2)
    assert best <= bound.best.cost * (1 + 1e-12)


def test_more_iterations_never_lower_the_bound() -> None:
    core = presolve(Core.of(two_axes(40)), effort=REDUCE)
    values = [lower_bound(core, iterations=count).value for count in (1, 3, 10, 30)]
    assert values == sorted(values)
