"""`autoshard.load_plan` and `autoshard.why_not`: plans from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import Pipeline, PipelinePlan, PlanError, ShardingPlan
from tests.pipeline.small_pipelines import tower
from tests.planner.steps import links
from tests.sample_plan import sample_plan

OPTIONS: dict[str, Any] = {"cluster": links(1e10, 1e-7), "search": autoshard.Search(effort="fast")}
STAGED: dict[str, Any] = {"pipeline": Pipeline(microbatches=4, virtual=1), **OPTIONS}


def test_a_file_of_any_kind_is_read_as_what_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    plan = sample_plan()
    for saved in (plan, autoshard.Frontier([plan])):
        saved.save(path)
        loaded = autoshard.load_plan(path)
        assert type(loaded) is type(saved)
        assert str(loaded) == str(saved)
    module, inputs = tower()
    pipelined = autoshard.plan(module, {"pp": 2}, (), inputs, **STAGED)
    pipelined.save(path)
    loaded = autoshard.load_plan(str(path))
    assert isinstance(loaded, PipelinePlan)
    assert loaded.to_json() == pipelined.to_json()
    path.write_text(pipelined.to_json()[:-9], "utf-8")
    for broken in (path, tmp_path / "none.json"):
        with pytest.raises(PlanError, match=str(broken)):
            autoshard.load_plan(broken)


def test_a_saved_plan_is_asked_with_its_model() -> None:
    module, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32)
    plan = autoshard.plan(module, {"dp": 2, "tp": 2}, (x,), hints={"2.bias": {"tp": Replicate()}}, **OPTIONS)
    assert isinstance(plan, ShardingPlan)
    asked = {"0.weight": {"dp": Shard(1)}}
    saved = ShardingPlan.from_json(plan.to_json())
    with pytest.raises(PlanError, match=r"ask autoshard\.why_not\(plan, asked, model"):
        saved.why_not(asked)
    with pytest.raises(PlanError, match=r"cluster is 'h100': pass cluster="):
        autoshard.why_not(saved, asked, module, (x,), cluster="h100")
    with pytest.raises(PlanError, match="the parameters agree, but the captured graph does not"):
        autoshard.why_not(saved, asked, module, (x[:6],), **OPTIONS)
    with pytest.raises(PlanError, match=r"leave out requests= and pipeline="):
        autoshard.why_not(saved, asked, module, (x,), requests={"schedule": "GPipe"}, **OPTIONS)
    with pytest.raises(PlanError, match=r"leave out requests= and pipeline="):
        autoshard.why_not(saved, asked, module, (x,), **STAGED)
    with pytest.raises(PlanError, match="a ShardingPlan or a PipelinePlan, not a Frontier"):
        autoshard.why_not(autoshard.Frontier([saved]), asked, module, (x,), **OPTIONS)  # type: ignore[call-overload]
    alternative, fresh = autoshard.why_not(saved, asked, module, (x,), **OPTIONS), plan.why_not(asked)
    assert alternative.sentence == fresh.sentence
    assert alternative.plan is not None
    assert alternative.plan.hints == {"2.bias": "tp: R", "0.weight": "dp: S(1)"}


def test_a_saved_pipeline_is_asked_with_its_model() -> None:
    module, inputs = tower()
    hints = {"layers.5.0.weight": {"tp": Replicate()}}
    plan = autoshard.plan(module, {"pp": 2, "tp": 2}, (), inputs, hints=hints, **STAGED)
    saved = PipelinePlan.from_json(plan.to_json())
    with pytest.raises(PlanError, match=r"ask autoshard\.why_not\(plan, asked, model"):
        saved.why_not(hints)
    answer = autoshard.why_not(saved, {}, module, (), inputs, requests={"schedule": "GPipe"}, **STAGED)
    assert answer.plan is not None
    assert answer.plan.schedule.name == "GPipe"
    assert answer.plan.stages[0].hints == {"layers.5.0.weight": "tp: R"}
    with pytest.raises(PlanError, match="'stages' cannot be asked of a pipeline"):
        autoshard.why_not(saved, {}, module, (), inputs, requests={"stages": 3}, **STAGED)
    with pytest.raises(PlanError, match="this pipeline plan does not fit"):
        autoshard.why_not(saved, hints, module, (), tower(8)[1], **STAGED)
