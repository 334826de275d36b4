from __future__ import annotations

from autoshard.pipeline.plan.pipeline_page import page
from tests.pipeline.test_pipeline_plan import plan_of
from tests.plans.test_html import read
from tests.sample_plan import sample_plan


def test_the_page_has_the_step_and_every_stage() -> None:
    text = page(plan_of())
    words = read(text).words
    for word in (
        "1F1B, 4 microbatches, 1 stage per rank",
        "rank 1",
        "h.3.attn to head",
        "chosen",
        "Stage 1: h.3.attn to head",
    ):
        assert word in words
    # A section for each of two stages.
    assert words.count("h.*.attn.qkv.weight") == 2
    assert text.count("<svg") == 1


def test_the_page_loads_nothing() -> None:
    text = page(plan_of())
    assert not read(text).attributes & {"src", "href"}
    assert "url(" not in text


def test_text_of_the_plan_is_escaped() -> None:
    text = page(plan_of(modules=(("<a>", "b"), ("c", "d")), stages=(sample_plan(hints={"<b>": "&"}), sample_plan())))
    assert "<a>" not in text
    assert "&lt;b&gt;" in text
    read(text)


def test_a_plan_without_costs_has_no_picture() -> None:
    text = page(plan_of(costs=(), modules=(), table=()))
    assert "<svg" not in text
    assert "Stage 1: (root) to (root)" in read(text).words
