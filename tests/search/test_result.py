"""What the search knows of one mesh, and the page of a result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autoshard.pipeline.plan.shape_planner import PipelineShape
from autoshard.search.result import BEST, MeshCandidate, Row, SearchResult
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape
from tests.plans.pages import Page
from tests.sample_plan import sample_plan

GIB = 2**30


def candidate(sizes: dict[str, int], least: float, **known: Any) -> MeshCandidate:
    """Return a mesh that takes at least so many seconds."""
    shape = Shape(MeshShape.of(sizes), "pp" if "pp" in sizes else None)
    return MeshCandidate(shape=shape, least_seconds=least, least_bytes=GIB, **known)


def result_of(*more: MeshCandidate) -> SearchResult:
    """Return a result with four meshes of eight devices: the best, a close one, a too large one, one not planned."""
    candidates = (
        candidate({"dp": 2, "tp": 4}, 0.01, seconds=0.0123, peak=6 * GIB, plan=sample_plan(), verdict=BEST),
        candidate({"pp": 2, "x": 4}, 0.01, seconds=0.0125, peak=5 * GIB, verdict="1.6% slower"),
        candidate({"x": 8}, 0.01, seconds=0.011, peak=9 * GIB, verdict="holds too much"),
        candidate({"pp": 8}, 0.013, verdict="not planned: it takes at least 13 ms"),
    )
    return SearchResult(
        option="mini-time", cluster="h100", memory_limit=8 * GIB, candidates=(*candidates, *more), notes=("a < b",)
    )


def test_the_page_has_the_meshes_and_the_best_plan() -> None:
    page = Page(result_of().to_html())
    assert {"pp=2, x=4 (pipeline pp)", "1.6% slower", "a < b", "h.*.attn.qkv.weight"} <= set(page.words)
    assert {"mesh-candidates", "modules"} <= set(page.charts)
    assert "devices" not in page.charts


def test_the_page_of_several_numbers_of_devices_shows_the_speed_up() -> None:
    plan = sample_plan(mesh=MeshShape.of({"dp": 4, "tp": 4}))
    more = candidate({"dp": 4, "tp": 4}, 0.005, seconds=0.008, peak=GIB, plan=plan, verdict=BEST)
    page = Page(result_of(more).to_html())
    fastest, perfect = page.series("devices")
    assert fastest["x"] == [8, 16]
    assert fastest["y"] == [0.0123, 0.008]
    assert perfect["y"] == [0.0123, 0.00615]
    assert "16: dp=4, tp=4" in {name for one in page.series("mesh-candidates") for name in one["y"]}


def test_another_size_of_a_pipeline_takes_what_those_took_that_were_planned_with_this_effort() -> None:
    row = Row(shape=Shape(MeshShape.of({"pp": 2, "x": 2}), "pp"), least_seconds=0.0, least_bytes=0, took=40.0)
    assert row.next_planning_seconds("fast") == 40.0
    planned: Any = {PipelineShape(2, 1): SimpleNamespace(took=3.0), PipelineShape(4, 1): SimpleNamespace(took=5.0)}
    row.planned_shapes["fast"] = planned
    assert row.next_planning_seconds("fast") == 5.0
    assert row.next_planning_seconds("full") == 40.0
