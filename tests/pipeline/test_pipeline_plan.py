from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autoshard.errors import PlanError
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_search import ScheduleCandidate
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.notebooks import check_repr, shown
from tests.sample_plan import sample_plan

COSTS = StageCosts(
    forward_seconds=1e-3, input_backward_seconds=2e-3, weight_backward_seconds=0.0, rest_bytes=2**30, saved_bytes=2**20
)


def plan_of(**changes: object) -> PipelinePlan:
    """Two ranks with a stage each, such as stages of `sample_plan`."""
    plan = PipelinePlan(
        mesh=MeshShape.of({"pp": 2, "dp": 2, "tp": 4}),
        axis="pp",
        stage_of={"embedding": 0, "mm": 1},
        recomputed={"mask": (1,)},
        schedule=schedule("1F1B", 2, 4),
        stages=(sample_plan(), sample_plan()),
        modules=(("embed", "h.2.mlp"), ("h.3.attn", "head")),
        costs=(COSTS, COSTS),
        step_seconds=0.0123,
        bubble=0.2,
        peaks=(3 * 2**30, 2**31),
        capacities=(2**33, 2**33),
        table=(
            ScheduleCandidate("1F1B", 4, 1, 0.0123, 0.2, 3 * 2**30, "chosen"),
            ScheduleCandidate("GPipe", 4, 1, None, None, None, "not simulated: it takes at least 2 s"),
        ),
        cluster="h100",
        contention=0.5,
        fingerprint="cd" * 32,
        timings={"capture": 1.0},
        versions={"autoshard": "0.1.0"},
    )
    return dataclasses.replace(plan, **changes)


def test_what_a_prompt_shows_of_a_plan_is_one_line() -> None:
    assert repr(plan_of()) == (
        "PipelinePlan(2 stages on pp=2, dp=2, tp=4, 4 microbatches, 12.3 ms per step; print it to see more)"
    )
    check_repr(plan_of())


def test_a_notebook_shows_the_tables_of_a_plan() -> None:
    page = shown(plan_of())
    assert page.tags["table"] == 4
    assert ["1F1B", "4", "1", "12.3 ms", "3.0 GiB", "chosen"] in page.rows


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = plan_of()
    plan.save(tmp_path / "plan.json")
    assert PipelinePlan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "cut short"),
        (lambda text: text.replace('"bubble": 0.2', '"bubble": 0.1'), "edited"),
        (lambda text: text.replace('"version": 2', '"version": 7'), "version 7"),
        (lambda text: sample_plan().to_json(), "is not a pipeline's plan"),
    ],
)
def test_a_harmed_file_is_refused(change: object, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        PipelinePlan.from_json(change(plan_of().to_json()))  # type: ignore[operator]


def test_a_file_of_a_pipeline_is_no_sharding_plan() -> None:
    with pytest.raises(PlanError, match="is not a sharding plan"):
        ShardingPlan.from_json(plan_of().to_json())


def test_a_plan_needs_an_order_for_every_rank_and_a_plan_for_every_stage() -> None:
    with pytest.raises(PlanError, match=r"for 3 ranks, and pipeline axis pp .* has 2"):
        plan_of(schedule=schedule("1F1B", 3, 4))
    with pytest.raises(PlanError, match="2 stages, and there are costs of 1"):
        plan_of(costs=(COSTS,))


def test_the_text_tells_stages_ranks_and_schedules() -> None:
    text = str(plan_of())
    for said in (
        "pp=2, dp=2, tp=4 (16 devices on cluster h100, pipeline axis pp)",
        "1F1B, 4 microbatches, 1 stage per rank",
        "12.3 ms (ranks do not compute 20.0%)",
        "peak 3.0 GiB of 8.0 GiB on rank 0",
        "embed to h.2.mlp",
        "h.3.attn to head",
        "not simulated: it takes at least 2 s",
    ):
        assert said in text
    assert max(map(len, text.splitlines())) <= 120
    assert "does not fit" in str(plan_of(capacities=(2**31, 2**33)))


def test_it_fits_where_all_peaks_do() -> None:
    assert plan_of().fits
    assert plan_of(capacities=(0, 0)).fits
    assert not plan_of(capacities=(2**33, 2**30)).fits


def test_stages_explain_themselves() -> None:
    said = plan_of().explain("h.0.attn.*")
    assert "stage 0" in said
    assert "stage 1" in said
    assert sample_plan().explain("h.0.attn.*") in said
    with pytest.raises(PlanError, match="nothing in the plan is at 'nowhere'"):
        plan_of().explain("nowhere")


def test_another_mesh_or_model_is_refused() -> None:
    plan = plan_of()
    plan.check(plan.mesh, plan.fingerprint)
    with pytest.raises(PlanError, match="made for the mesh pp=2, dp=2, tp=4; this mesh is pp=2, dp=4, tp=2"):
        plan.check(MeshShape.of({"pp": 2, "dp": 4, "tp": 2}), plan.fingerprint)
    with pytest.raises(PlanError, match=r"one of its 4 microbatches is another \(efefefefefef here, cdcdcdcdcdcd"):
        plan.check(plan.mesh, "ef" * 32)


def test_a_step_can_be_looked_at(tmp_path: Path) -> None:
    plan = plan_of()
    plan.trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text("utf-8"))["traceEvents"]
    assert {event["name"] for event in events} >= {"0F0", "1B3", "memory"}
