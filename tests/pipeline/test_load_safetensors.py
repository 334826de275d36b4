"""Pipelines filled from files of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import autoshard
from autoshard.errors import InputError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from tests.pipeline.pipelines import held_by, pipeline_of, plan_by_hand
from tests.pipeline.small_pipelines import tied
from tests.workers import Workers

pytestmark = pytest.mark.xdist_group("gloo")
LAST = "norm.bias"
"""A parameter of the last stage."""


def loaded(plan: PipelinePlan, file: Path) -> dict[str, torch.Tensor]:
    """What the rank holds of a model without numbers that is filled from a file."""
    inputs = tied()[1]
    with torch.device("meta"):
        module = tied()[0]
    pipeline = pipeline_of(module, inputs, plan)
    assert autoshard.load_safetensors(pipeline, file) == ([], [])
    autoshard.materialize(pipeline)  # nothing is left to do
    return held_by(pipeline)


def refused(plan: PipelinePlan, file: Path) -> str:
    """What is said of a file that lacks what the last stage holds, and has what no stage holds."""
    module, inputs = tied()
    pipeline = pipeline_of(module, inputs, plan)
    with pytest.raises(InputError) as error:
        autoshard.load_safetensors(pipeline, file)
    return str(error.value)


def test_every_rank_reads_what_its_stages_hold(two: Workers, tmp_path: Path) -> None:
    module, inputs = tied()
    plan = plan_by_hand(module, inputs, {"pp": 2}, schedule("1F1B", 2, 2))
    file = tmp_path / "model.safetensors"
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items() if name != "head.weight"}
    assert len(state) == len(module.state_dict()) - 1  # a file has a tied parameter once
    save_file(state, file)
    state["head.weight"] = state["table.weight"]
    ranks = two.run(loaded, plan, file)
    for held in ranks:
        for name, value in held.items():
            assert torch.equal(value, state[name]), name
    assert set().union(*ranks) == state.keys()

    lacking = {name: value for name, value in state.items() if name not in (LAST, "head.weight")}
    save_file({"stranger": torch.zeros(2)} | lacking, file)
    first, second = two.run(refused, plan, file)
    assert "Unexpected key(s): stranger." in first
    assert "Missing" not in first
    assert f"Missing key(s): {LAST}." in second
