"""The search with pipelines as they are planned."""

from __future__ import annotations

import pytest

import autoshard
from autoshard import PipelinePlan
from autoshard.cluster.cluster import Cluster
from autoshard.search.shapes import Shape
from tests import models
from tests.search.test_mesh_search import hosts

planning = pytest.importorskip("autoshard.pipeline.plan.pipeline_planner", reason="pipelines are not there yet")


def slow_network() -> Cluster:
    """Hosts of two devices that are better off with a stage each."""
    return hosts(2)


def test_pipelines_keep_their_bounds_and_are_taken_where_they_are_faster() -> None:
    module, kwargs = models.ALL["gpt"]()
    result = autoshard.search(
        module, 4, (), kwargs, cluster=slow_network(), search=autoshard.Search(effort="fast", time_limit=1000.0)
    )
    staged = [one for one in result.candidates if one.shape.axis is not None and one.seconds is not None]
    assert staged
    for one in result.candidates:
        if one.seconds is not None and one.peak is not None:
            assert one.least_seconds <= one.seconds * (1 + 1e-9)
            assert one.least_bytes <= one.peak
    assert result.best.seconds == min(one.seconds for one in result.candidates if one.seconds is not None)
    assert isinstance(result.best.shape, Shape)
    assert (result.pipeline_axis is None) == (result.best.shape.axis is None)
    assert result.plan.mesh == result.mesh
    # Every plan remembers how it was made.
    plan = next(one.plan for one in staged if one.plan is not None)
    assert isinstance(plan, PipelinePlan)
    assert plan.why_not(schedule=plan.schedule.name).verdict == "same"
