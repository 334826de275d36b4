from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings

from autoshard.solver import Problem, solve
from autoshard.solver.bound import lower_bound
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.flat.dual import Dual
from autoshard.solver.presolve import presolve
from tests.solver.problems import brute_force, small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=80, deadline=None)
def test_bounds_and_floors_are_true(problem: Problem) -> None:
    core = presolve(Core.of(problem))
    if not core.feasible or not core.nodes:
        return
    dual = Dual(core, CoreArrays.of(core))
    dual.run(15)
    best = brute_force(problem)
    slack = 1e-9 * max(abs(best), 1.0) if np.isfinite(best) else 0.0
    assert dual.bound <= best + slack
    if dual.best is not None:
        assert dual.cost == core.value(dual.best) >= best - slack
    floors = dual.floors()
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        if (core.loads(places) <= core.slack).all():
            assert (
                floors[core.offset[:-1] + places] <= core.value(places) + 1e-9 * abs(core.value(places)) + 1e-9
            ).all()


def test_prices_rise_where_the_limit_binds() -> None:
    problem = with_memory(two_axes(24, labels=3), 0.3)
    core = presolve(Core.of(problem))
    dual = Dual(core, CoreArrays.of(core))
    free = lower_bound(core, iterations=5).value
    dual.run(200, patience=200)
    assert dual.bound > free
    assert (dual.best_prices >= 0).all()
    assert dual.best_prices.any()
    assert dual.bound <= dual.cost


def test_prices_come_near_the_optimum_without_a_known_choice() -> None:
    """Without prices the bound is far below: what is left at the end is the relaxation's gap and little else."""
    problem = with_memory(two_axes(24, labels=3), 0.3)
    best = solve(problem, method="ilp", time_limit=60.0)
    assert best.status == "optimal"
    core = presolve(Core.of(problem))
    dual = Dual(core, CoreArrays.of(core))
    free = lower_bound(core, iterations=5).value
    dual.run(400, patience=400)
    assert best.cost - dual.bound < 0.25 * (best.cost - free)
