from __future__ import annotations

from collections import Counter

import pytest

from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.simulate.events import COMPUTE
from tests.pipeline.test_pipeline_plan import plan_of
from tests.plans.pages import Page
from tests.sample_plan import sample_plan


def test_the_page_has_the_step_and_every_stage() -> None:
    page = Page(plan_of().to_html())
    for word in (
        "1F1B, 4 microbatches, 1 stage per rank",
        "h.3.attn to head",
        "chosen",
        "Stage 1: h.3.attn to head",
    ):
        assert word in page.words
    # A section for each of two stages.
    assert page.words.count("h.*.attn.qkv.weight") == 2
    charts = {"timeline", "memory", "candidates"}
    charts |= {f"stage-{stage}-{name}" for stage in (0, 1) for name in ("modules", "collectives-by-module")}
    assert set(page.charts) == charts
    assert page.links == []


def test_the_bars_and_lines_are_the_simulated_step() -> None:
    costs = StageCosts(
        forward_seconds=1e-3,
        input_backward_seconds=2e-3,
        weight_backward_seconds=0.0,
        forward_send_seconds=1e-4,
        forward_bytes=1,
        rest_bytes=2**30,
        saved_bytes=2**20,
    )
    plan = plan_of(costs=(costs, costs))
    step, page = plan.simulation, Page(plan.to_html())
    timeline, memory = page.series("timeline"), page.series("memory")
    for rank in (0, 1):
        drawn = [x for one in timeline for row, x in zip(one["y"], one["x"], strict=True) if row == f"rank {rank}"]
        computed = [
            end - start
            for task, start, end in zip(step.tasks, step.starts, step.ends, strict=True)
            if task.stream == COMPUTE and rank in task.ranks and end > start
        ]
        assert sorted(drawn) == pytest.approx(sorted(computed))
        assert max(memory[rank]["y"]) == step.peaks[rank]
    # A message is drawn at both of its ranks.
    rows = Counter(row for one in timeline for row in one["y"])
    assert rows["messages of 0"] == rows["messages of 1"] == 4


def test_text_of_the_plan_is_escaped() -> None:
    changes = {"modules": (("<a>", "b"), ("c", "d")), "stages": (sample_plan(hints={"<b>": "&"}), sample_plan())}
    words = Page(plan_of(**changes).to_html()).words
    assert "Stage 0: <a> to b" in words
    assert "<b>: &" in words


def test_a_plan_without_costs_has_no_picture() -> None:
    page = Page(plan_of(costs=(), modules=(), table=()).to_html())
    assert not {"timeline", "memory", "candidates"} & set(page.charts)
    assert "Stage 1: (root) to (root)" in page.words
