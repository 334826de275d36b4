"""Whale's primitives on a mesh with a pipeline axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import HintError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from tests.option_groups import grouped
from tests.pipeline.small_pipelines import Regions
from tests.training import fast_links

MESH = {"pp": 2, "x": 2}


def planned(module: nn.Module, mesh: dict[str, int] = MESH, **options: object) -> PipelinePlan:
    batch = torch.randn(8, 16), torch.randn(8, 16)
    said = {"microbatches": 2, "cluster": fast_links(), "effort": "fast", **options}
    plan = autoshard.plan(module, mesh, batch, **grouped(said))  # type: ignore[arg-type]
    assert isinstance(plan, PipelinePlan)
    return plan


def splits(plan: PipelinePlan) -> list[set[bool]]:
    """For every stage, whether its parameters are in shards."""
    return [{any(not one.is_replicate() for one in row) for row in stage.placements.values()} for stage in plan.stages]


def test_task_graphs_with_devices_of_their_own_are_stages() -> None:
    plan = planned(Regions(autoshard.replicate(2), autoshard.split(2)))
    assert [set(stage.placements) for stage in plan.stages] == [
        {"layers.0.0.weight", "layers.1.0.weight"},
        {"layers.2.0.weight"},
    ]
    assert splits(plan) == [{False}, {True}]
    assert [list(stage.hints) for stage in plan.stages] == [["replicate(2)"], ["split(2)"]]
    assert {line.virtual for line in plan.table} == {1}


def test_other_task_graphs_are_inside_of_stages() -> None:
    """A single number of devices, names of axes, a default of a module and a hint: none says where a stage ends."""
    assert splits(planned(Regions(None, autoshard.split(2)), virtual=1))[1] == {True}
    module = Regions(None, None)
    autoshard.set_default_strategy(module, autoshard.replicate("x"))
    plan = planned(module, virtual=1, hints={"layers.1.0": autoshard.split("x")})
    found = {name: row for stage in plan.stages for name, row in stage.placements.items()}
    sharded = {name for name, row in found.items() if any(not one.is_replicate() for one in row)}
    assert sharded == {"layers.1.0.weight"}


def test_marks_that_the_mesh_has_no_stages_for() -> None:
    two = Regions(autoshard.replicate(1), autoshard.replicate(1))
    with pytest.raises(HintError, match=r"marks 2 task graphs .* the pipeline has 3 stages: 3 ranks with 1 each"):
        planned(two, {"pp": 3})
    with pytest.raises(HintError, match=r"marks 2 task graphs .* the pipeline has 4 stages: 2 ranks with 2 each"):
        planned(two, virtual=2)
    with pytest.raises(HintError, match="replicate\\(4\\) asks for 4 devices, and no axis of the mesh x=2"):
        planned(Regions(autoshard.replicate(4), autoshard.replicate(4)))
