from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings

from autoshard.solver import Problem
from autoshard.solver.flat.core import Core
from autoshard.solver.flat.thin import forbid_oversized, thin_memory
from tests.solver.problems import small_problems


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_moments_left_out_are_implied(problem: Problem) -> None:
    core = Core.of(problem)
    thin = thin_memory(core)
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        kept = bool((thin.loads(places) <= thin.slack).all()) and thin.feasible
        assert kept == bool((core.loads(places) <= core.slack).all())


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_strategies_too_large_by_themselves_are_in_no_feasible_choice(problem: Problem) -> None:
    core = thin_memory(Core.of(problem))
    left = forbid_oversized(core)
    gone = np.isfinite(core.cost) & np.isinf(left.cost)
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        if core.feasible and (core.loads(places) <= core.slack).all():
            assert not gone[core.offset[:-1] + places].any()
