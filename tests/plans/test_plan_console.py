from __future__ import annotations

import io

import pytest
from rich.console import Console

from autoshard.errors import PlanError
from autoshard.plans.plan_console import explanation_table, plan_table
from tests.sample_plan import sample_plan


def printed(table: object, **options: object) -> str:
    console = Console(file=io.StringIO(), width=120, **options)
    console.print(table)
    return console.file.getvalue()


def test_the_terminal_says_what_the_text_says() -> None:
    plan = sample_plan()
    assert printed(plan_table(plan)).split() == str(plan).split()


def test_an_explanation_says_what_the_text_says() -> None:
    plan = sample_plan()
    assert printed(explanation_table(plan, "h.*.mlp")).split() == plan.explain("h.*.mlp").split()


def test_sharded_placements_are_coloured() -> None:
    text = printed(plan_table(sample_plan()), force_terminal=True, color_system="standard")
    assert "\x1b[36mS(0,f=3)\x1b[0m" in text


def test_an_explanation_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="nothing in the plan"):
        explanation_table(sample_plan(), "nowhere")
