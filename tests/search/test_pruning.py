"""What plans of some meshes tell of others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autoshard.search.pruning import slow_pipeline_reason, slow_within_limit_reason
from autoshard.search.row import Row, UnlimitedResult
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape


def row(seconds: float | None = None, free: tuple[float, int] | None = None, estimate: float | None = None) -> Row:
    """A mesh with a plan of so many seconds that fits, and one that does not, of seconds and bytes."""
    one = Row(shape=Shape(MeshShape.of({"x": 4})), least_seconds=0.0, least_bytes=0)
    if seconds is not None:
        plan: Any = SimpleNamespace(step_seconds=seconds, peaks=(1,))
        one.add_plan(plan)
    one.unlimited = None if free is None else UnlimitedResult(*free)
    one.estimate = estimate
    return one


def test_a_pipeline_is_judged_by_the_estimate_that_fell_short_least() -> None:
    best, other = row(10.0, estimate=8.0), row(20.0, estimate=10.0)
    rows = [best, other]
    assert slow_pipeline_reason(row(estimate=8.2), rows, best) is None
    assert slow_pipeline_reason(row(estimate=8.4), rows, best) == "not planned: it is estimated to take 10.5 s"
    assert slow_pipeline_reason(row(estimate=10.2), [best], best) is not None


def test_what_the_limit_took_of_some_meshes_it_takes_of_those_that_hold_as_much() -> None:
    best = row(10.0)
    fitted = row(12.0, free=(9.0, 100))
    said = "not planned: within the memory limit it is estimated to take 12.7 s"
    assert slow_within_limit_reason(row(free=(9.5, 100)), [best, fitted], best) == said
    assert slow_within_limit_reason(row(free=(9.5, 99)), [best, fitted], best) is None, (
        "it holds less: it may lose less"
    )
    lost_less = row(9.5, free=(9.4, 90))
    assert slow_within_limit_reason(row(free=(9.5, 100)), [best, fitted, lost_less], best) is None


def test_what_is_no_faster_without_a_limit_is_not_planned_within_it() -> None:
    best = row(10.0)
    assert slow_within_limit_reason(row(free=(10.0, 5)), [best], best) == "without a memory limit it takes 10 s already"
    assert slow_within_limit_reason(row(free=(9.9, 5)), [best], best) is None
