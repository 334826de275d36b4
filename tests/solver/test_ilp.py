from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Problem
from autoshard.solver.core import Core
from autoshard.solver.ilp import solve_core
from autoshard.solver.presolve import presolve
from tests.solver.problems import brute_force, small_problems, two_axes, with_memory


@given(problem=small_problems())
@settings(max_examples=40, deadline=None)
def test_the_program_equals_brute_force(problem: Problem) -> None:
    best = brute_force(problem)
    core = presolve(Core.of(problem))
    if not core.feasible:
        assert not np.isfinite(best)
        return
    answer = solve_core(core)
    assert answer.proved
    assert (answer.places is None) == (not np.isfinite(best))
    if answer.places is not None:
        assert core.value(answer.places) == pytest.approx(best)
        assert answer.bound <= best + 1e-6 * max(abs(best), 1.0)


def test_rows_of_memory_are_added_as_they_are_violated(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = with_memory(two_axes(24, labels=3), 0.3)
    core = presolve(Core.of(problem))
    whole = solve_core(core)
    monkeypatch.setattr("autoshard.solver.ilp._FEW", 0)
    lazy = solve_core(core, moments=np.zeros(0, dtype=np.int64))
    assert whole.proved
    assert lazy.proved
    assert lazy.places is not None
    assert whole.places is not None
    assert core.value(lazy.places) == pytest.approx(core.value(whole.places), rel=1e-9)
