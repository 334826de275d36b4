"""A search that time ends gives a plan that is as fast as the best standard layout that fits."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.plans.sharding_plan import ShardingPlan
from tests import models
from tests.training import TOLERANCE, captured_as, compare, one_device, train_on_mesh

MESH = {"dp": 2, "tp": 2}
NO_TIME = autoshard.Search(time_limit=1e-9)
OPTIONS: dict[str, Any] = {"cluster": "h100", "output_placements": "planned", "recompute": "none"}


@functools.cache
def captured() -> tuple[models.Model, JointGraph]:
    module, inputs = models.gpt(batch=4, layers=1)
    return (module, inputs), capture(module, (), inputs)


@functools.cache
def layouts() -> dict[str, ShardingPlan]:
    (module, inputs), graph = captured()
    with captured_as(graph):
        found = autoshard.compare(module, MESH, (), inputs, search=autoshard.Search(effort="fast"), **OPTIONS)
    return {row.name: row.made for row in found.layouts if row.kind == "standard" and not row.reason}


@pytest.mark.parametrize("share", [1.0, 0.7, 0.55])
def test_a_search_that_time_ends_is_no_slower_than_a_standard_layout(share: float) -> None:
    limit = int(share * layouts()["DDP"].memory.peak)
    fitting = {name: plan.step_seconds for name, plan in layouts().items() if plan.memory.peak <= limit}
    assert fitting
    (module, inputs), graph = captured()
    with captured_as(graph):
        plan = autoshard.plan(module, MESH, (), inputs, memory_limit=limit, search=NO_TIME, **OPTIONS)
    assert plan.memory.peak <= limit
    assert plan.step_seconds <= min(fitting.values())
    assert plan.ended_early


def test_such_a_plan_trains_as_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layout's hints nothing stays behind that a later plan or the program would take for the model's own."""
    monkeypatch.setattr("tests.training.PLANNING_SECONDS", 1e-9)
    trace = train_on_mesh("mlp", MESH)
    assert compare(trace, one_device("mlp")).worst < TOLERANCE
