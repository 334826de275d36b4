from __future__ import annotations

from autoshard.solver.incumbent import Incumbent, SolverProgress
from autoshard.solver.solver_budget import Budget


def test_only_better_assignments_are_kept() -> None:
    best = Incumbent(Budget())
    assert best.assignment == ()
    assert best.offer(3.0, lambda: (1,), "first")
    assert not best.offer(3.0, lambda: (2,), "second")
    assert best.assignment == (1,)
    assert best.method == "first"


def test_a_close_bound_stops_the_budget() -> None:
    reports: list[SolverProgress] = []
    best = Incumbent(Budget(gap=0.1), reports.append)
    best.raise_bound(8.0)
    best.raise_bound(7.0)
    assert best.lower_bound == 8.0
    best.offer(10.0, lambda: (0,), "far")
    assert not best.budget.is_over
    best.report("here")
    best.offer(8.5, lambda: (1,), "near")
    assert best.budget.is_over
    assert [(moment.phase, moment.cost, moment.lower_bound) for moment in reports] == [("here", 10.0, 8.0)]
