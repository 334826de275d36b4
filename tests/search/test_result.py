"""What the search knows of one mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autoshard.pipeline.plan.shape_planner import PipelineShape
from autoshard.search.result import Row
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape


def test_another_size_of_a_pipeline_takes_what_those_took_that_were_planned_with_this_effort() -> None:
    row = Row(shape=Shape(MeshShape.of({"pp": 2, "x": 2}), "pp"), least_seconds=0.0, least_bytes=0, took=40.0)
    assert row.next_planning_seconds("fast") == 40.0
    planned: Any = {PipelineShape(2, 1): SimpleNamespace(took=3.0), PipelineShape(4, 1): SimpleNamespace(took=5.0)}
    row.planned_shapes["fast"] = planned
    assert row.next_planning_seconds("fast") == 5.0
    assert row.next_planning_seconds("full") == 40.0
