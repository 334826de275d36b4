from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import HintError, Pipeline, PipelineError, PipelinePlan, PlanError
from autoshard.pipeline.plan.pipeline_replanner import PipelineReplanner
from tests.pipeline.small_pipelines import tower
from tests.planner.steps import links

MESH = {"pp": 2, "tp": 2}
WEIGHTS = "layers.*.0.weight"
OPTIONS: dict[str, Any] = {"cluster": links(1e10, 1e-7), "search": autoshard.Search(effort="fast")}


def planned(module: nn.Module, inputs: dict[str, Any], **options: Any) -> PipelinePlan:
    options = {"pipeline": Pipeline(microbatches=4, virtual=1), **OPTIONS, **options}
    plan = autoshard.plan(module, MESH, (), inputs, **options)
    assert isinstance(plan, PipelinePlan)
    return plan


@pytest.fixture(scope="module")
def model() -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        return tower()


@pytest.fixture(scope="module")
def plan(model: tuple[nn.Module, dict[str, Any]]) -> PipelinePlan:
    return planned(*model, hints={"layers.5.0.weight": {"tp": Replicate()}})


def weights(plan: PipelinePlan) -> dict[str, Any]:
    placements = {name: row for stage in plan.stages for name, row in stage.placements.items()}
    return {name: row[0] for name, row in placements.items() if name.endswith("0.weight")}


def test_the_alternative_has_what_was_asked_and_adds_up(plan: PipelinePlan) -> None:
    asked = Shard(1 if weights(plan)["layers.0.0.weight"] == Shard(0) else 0)
    alternative = plan.why_not({"layers.[0-2].0.weight": {"tp": asked}})
    other, difference = alternative.plan, alternative.difference
    assert alternative.verdict == "possible"
    assert other is not None
    assert difference is not None
    assert {weights(other)[f"layers.{layer}.0.weight"] for layer in range(3)} == {asked}
    # The hints and the options of the plan hold too.
    assert weights(other)["layers.5.0.weight"] == Replicate()
    assert (other.microbatches, other.virtual) == (4, 1)
    assert difference.seconds == other.step_seconds - plan.step_seconds
    changed = sum(change.seconds for change in difference.changes)
    spent = changed - difference.overlap + difference.bubble + difference.other
    assert spent == pytest.approx(difference.seconds, rel=1e-6, abs=1e-12)
    assert any(change.module.startswith("layers.") for change in difference.changes)
    # The other plan can be asked in turn, and has it.
    assert other.why_not({"layers.[0-2].0.weight": {"tp": asked}}).verdict == "same"


def test_schedule_and_microbatches_are_asked(plan: PipelinePlan) -> None:
    answer = plan.why_not(schedule="gpipe", microbatches=8)
    assert answer.plan is not None
    assert (answer.plan.schedule.name, answer.plan.microbatches) == ("GPipe", 8)
    assert "GPipe, 8 microbatches, 1 stage per rank in place of" in answer.sentence
    assert answer.plan.why_not(schedule="GPipe").verdict == "same"
    assert plan.why_not(schedule=plan.schedule.name, microbatches=4).verdict == "same"
    with pytest.raises(PipelineError, match="there is no schedule 'GPipes'"):
        plan.why_not(schedule="GPipes")
    with pytest.raises(PlanError, match="microbatches=0"):
        plan.why_not(microbatches=0)


@pytest.mark.parametrize(
    ("asked", "requests", "reason"),
    [
        ({}, {"microbatches": 3}, "a batch of 16 can't be divided into 3 microbatches"),
        ({}, {"schedule": "DualPipeV"}, "there is no schedule for 2 ranks"),
        ({WEIGHTS: {"tp": Shard(2)}}, {}, "which has 2 dims"),
        ({"*": autoshard.replicate(3)}, {}, "asks for 3 devices"),
    ],
)
def test_no_plan_can_have_it(plan: PipelinePlan, asked: dict[str, Any], requests: dict[str, Any], reason: str) -> None:
    answer = plan.why_not(asked, **requests)
    assert answer.verdict == "impossible"
    assert reason in answer.sentence


@pytest.mark.parametrize("asked", [None, {}, 7, {"nowhere": Replicate()}, {WEIGHTS: {"pp": Shard(0)}}])
def test_questions_that_are_not_valid(plan: PipelinePlan, asked: Any) -> None:
    with pytest.raises(HintError):
        plan.why_not(asked)


def test_no_plan_fits(model: tuple[nn.Module, dict[str, Any]]) -> None:
    options: dict[str, Any] = {"pipeline": Pipeline(schedule="1F1B", microbatches=4, virtual=1), "recompute": "none"}
    sharded = planned(*model, hints={WEIGHTS: {"tp": Shard(0)}}, memory_limit="40KiB", **options)
    answer = sharded.why_not({WEIGHTS: Replicate()})
    assert (answer.verdict, answer.plan) == ("too large", None)
    assert answer.sentence.startswith("No plan that has this fits in 40.0 KiB: the smallest peak that was found is ")


def test_primitives_are_asked(plan: PipelinePlan) -> None:
    answer = plan.why_not({"layers.*": autoshard.split("tp")})
    assert answer.plan is not None
    assert weights(answer.plan)["layers.0.0.weight"].is_shard()
    # Asked again, the planner finds the same plan.
    assert answer.plan.why_not({"layers.*": autoshard.split("tp")}).verdict == "same"


def test_a_call_that_is_another_than_the_planned_one_is_refused() -> None:
    module, inputs = tower()
    plan = planned(module, inputs)
    module.layers[1] = nn.Identity()  # type: ignore[index, operator]
    with pytest.raises(PlanError, match="this pipeline plan does not fit"):
        plan.why_not(schedule="GPipe")


def test_a_plan_of_a_model_on_the_meta_device_keeps_what_was_captured(plan: PipelinePlan) -> None:
    other = plan.why_not({"layers.0.0.weight": Replicate()}).plan
    assert other is not None
    assert isinstance(plan.replanner, PipelineReplanner)
    assert isinstance(other.replanner, PipelineReplanner)
    assert plan.replanner.captures is not None
    assert other.replanner.captures is plan.replanner.captures


def test_a_plan_keeps_no_weights_and_its_copies_remember_nothing() -> None:
    module, inputs = tower()
    weight = weakref.ref(module.layers[0][0].weight)  # type: ignore[union-attr, index]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plan = planned(module, inputs, optimizer=optimizer)
    for other in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.replanner is None
    module.eval()
    del module, optimizer
    gc.collect()
    assert weight() is None
    with pytest.raises(PlanError, match="the model of this plan exists no more"):
        plan.why_not({"layers.0": Replicate()})
