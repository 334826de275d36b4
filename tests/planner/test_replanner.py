from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import Cluster, HintError, PlanError, ShardingPlan
from autoshard.plans.plan_difference import PlanDifference
from tests.models import hf_llama
from tests.planner.steps import links

MESH = {"dp": 2, "tp": 2}
UP = "model.layers.*.mlp.up_proj.weight"


def made(module: nn.Module, inputs: dict[str, Any], **options: Any) -> ShardingPlan:
    options = {"cluster": links(1e10, 1e-7), "search": autoshard.Search(effort="fast"), **options}
    plan = autoshard.plan(module, MESH, (), inputs, **options)
    assert isinstance(plan, ShardingPlan)
    return plan


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, dict[str, Any]]:
    return hf_llama()


@pytest.fixture(scope="module")
def plan(llama: tuple[nn.Module, dict[str, Any]]) -> ShardingPlan:
    return made(*llama, hints={"lm_head.weight": {"tp": Replicate()}})


def test_the_alternative_has_what_was_asked_and_adds_up(plan: ShardingPlan) -> None:
    name = UP.replace("*", "0")
    asked = Shard(1 if plan.placements[name][1] == Shard(0) else 0)
    alternative = plan.why_not({UP: {"tp": asked}})
    other = alternative.plan
    assert alternative.verdict == "possible"
    assert other is not None
    assert {other.placements[UP.replace("*", layer)][1] for layer in "01"} == {asked}
    # The hints of the plan hold too.
    assert other.placements["lm_head.weight"][1] == Replicate()
    difference = alternative.difference
    assert difference is not None
    assert difference.seconds == other.step_seconds - plan.step_seconds
    spent = sum(change.seconds for change in difference.changes) - difference.overlap + difference.other
    assert spent == pytest.approx(difference.seconds, rel=1e-6)
    assert alternative.sentence.startswith("It is possible")
    assert "in place of" in alternative.sentence
    assert str(alternative).replace("\n", " ").startswith(alternative.sentence)
    # The other plan can be asked in turn, and has it.
    again = other.why_not({UP: {"tp": asked}})
    assert (again.verdict, again.plan, str(again)) == ("same", other, "The plan has it already.")


def test_primitives_are_asked_one_after_the_other(plan: ShardingPlan) -> None:
    replicated = plan.why_not({"": autoshard.replicate()})
    assert replicated.plan is not None
    assert all(placement == Replicate() for row in replicated.plan.placements.values() for placement in row)
    assert replicated.plan.why_not({"": autoshard.replicate()}).verdict == "same"
    # The task graph of the question before is forgotten.
    asked = {UP: plan.placements[UP.replace("*", "0")]}
    assert plan.why_not(asked).verdict == "same"
    split = plan.why_not({"model.layers.*.mlp": autoshard.split("tp")})
    assert split.plan is not None
    assert split.plan.placements[UP.replace("*", "1")][1].is_shard()


def test_no_plan_fits() -> None:
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), torch.empty(4, 512)
    fast = autoshard.Search(effort="fast")
    plan = autoshard.plan(module, {"tp": 4}, (x,), memory_limit="4MiB", recompute="none", search=fast)
    assert isinstance(plan, ShardingPlan)
    alternative = plan.why_not({"*": Replicate()})
    assert (alternative.verdict, alternative.plan, alternative.difference) == ("too large", None, None)
    assert str(alternative).startswith("No plan that has this fits in 4.0 MiB: the smallest peak that was found is 1")
    # Without a limit there is such a plan, which a device may have no memory for.
    device = dataclasses.replace(Cluster.preset("h100").device, memory=2**22)
    cluster = dataclasses.replace(Cluster.preset("h100"), device=device)
    hints = {"*.weight": {"tp": Shard(0)}}
    plan = autoshard.plan(module, {"tp": 4}, (x,), cluster=cluster, hints=hints, search=fast)
    assert isinstance(plan, ShardingPlan)
    assert plan.fits
    alternative = plan.why_not({"*.weight": Replicate()})
    assert alternative.plan is not None
    assert not alternative.plan.fits
    assert "but peaks at 1" in alternative.sentence
    assert "of 4.0 MiB: step" in alternative.sentence


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"*": autoshard.replicate(3)}, "asks for 3 devices"),
        ({"lm_head.*": {"tp": Shard(0)}}, "contradict each other on lm_head.weight"),
        ({"model.norm.weight": {"tp": Shard(1)}}, "which has 1 dims"),
    ],
)
def test_no_plan_can_have_it(plan: ShardingPlan, asked: dict[str, Any], reason: str) -> None:
    alternative = plan.why_not(asked)
    assert alternative.verdict == "impossible"
    assert alternative.sentence.startswith("It cannot be: ")
    assert reason in alternative.sentence


@pytest.mark.parametrize("asked", [{}, None, 7, {"nowhere": Replicate()}, {"*": {"x": Shard(0)}}, {"*": "S(0)"}])
def test_questions_that_are_not_valid(plan: ShardingPlan, asked: Any) -> None:
    with pytest.raises(HintError):
        plan.why_not(asked)


def test_a_plan_keeps_no_weights_and_its_copies_remember_nothing() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weight = weakref.ref(module[0].weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    plan = autoshard.plan(module, {"dp": 2}, (torch.randn(4, 8),), optimizer=optimizer)
    assert isinstance(plan, ShardingPlan)
    for other in (copy.copy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.replanner is None
    assert plan.why_not({"0": Replicate()}).plan is not None
    del module, optimizer
    gc.collect()
    assert weight() is None
    with pytest.raises(PlanError, match="the model of this plan exists no more"):
        plan.why_not({"0": Replicate()})


def test_plans_of_a_search_remember_their_capture() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    result = autoshard.search(module, 2, (torch.randn(4, 8),), pipelines=False, search=autoshard.Search(effort="fast"))
    assert isinstance(result.plan, ShardingPlan)
    alternative = result.plan.why_not({"*": Replicate()})
    assert alternative.plan is not None
    assert PlanDifference.of(result.plan, alternative.plan).seconds >= 0
