from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autoshard.solver import Problem
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.flat.descent import Descent
from autoshard.solver.presolve import presolve
from tests.solver.problems import two_axes, with_memory


@pytest.fixture(scope="module")
def problem() -> Problem:
    return with_memory(two_axes(40, labels=3, seed=3), 0.3)


def started(problem: Problem, seed: int = 0) -> tuple[Core, Descent]:
    """A descent from the choice that is cheapest node by node, which passes the limit."""
    core = presolve(Core.of(problem))
    ends = zip(core.offset[:-1], core.offset[1:], strict=True)
    places = np.array([core.cost[low:high].argmin() for low, high in ends], dtype=np.int64)
    descent = Descent(core, CoreArrays.of(core), 100.0, seed)
    descent.begin(places, np.zeros(len(core.base)))
    return core, descent


def test_a_choice_that_passes_the_limit_is_led_within_it(problem: Problem) -> None:
    core, descent = started(problem)
    for _ in range(30):
        descent.run(forests=50)
    assert descent.is_within_limit
    assert descent.best is not None
    assignment = core.expand(descent.best).tolist()
    assert problem.feasible(assignment)
    assert problem.cost(assignment) == pytest.approx(descent.cost)


def test_the_best_choice_never_becomes_dearer(problem: Problem) -> None:
    _, descent = started(problem)
    costs = []
    for step in range(30):
        descent.run(temperature=0.5 * (step % 2), forests=30)
        costs.append(descent.cost)
    assert np.isfinite(costs[-1])
    assert all(after <= before for before, after in pairwise(costs))


def test_the_same_seed_makes_the_same_choices(problem: Problem) -> None:
    result = []
    for _ in range(2):
        _, descent = started(problem, seed=5)
        for _ in range(5):
            descent.run(forests=40)
        result.append((descent.places.tolist(), descent.work))
    assert result[0] == result[1]
