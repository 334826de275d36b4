from __future__ import annotations

import re

import pytest

from autoshard.plans.html import Fold
from autoshard.plans.plan_data import Decision
from autoshard.plans.plan_page import page, saved_by_operator, step_bar
from tests.plans.pages import Page
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan


def test_the_page_holds_what_the_plan_says() -> None:
    read = Page(page(sample_plan()))
    for word in ("h.*.attn.qkv.weight", "S(0,f=3)", "all_reduce", "aten.mm", "input_ids", "optimizer 2.0 GiB"):
        assert word in read.words
    # A plan of an older version has no replay, and no chart of its step.
    assert set(read.figures) == {"modules", "collectives-by-module"}


def test_the_page_loads_nothing() -> None:
    text = page(sample_plan())
    assert all(link.startswith("#") for link in Page(text).links)
    assert "default-src 'none'" in text


def test_text_of_the_plan_is_escaped() -> None:
    read = Page(page(sample_plan(hints={"<script>": "a & b"})))
    assert "<script>: a & b" in read.words


def test_a_long_table_is_folded_up() -> None:
    many = tuple(Decision(f"n{i}", f"aten.op{i}", "m", "forward", "R -> R", 1e-6) for i in range(40))
    assert "40 rows" in Page(page(sample_plan(choices=many))).words


def test_a_plan_of_nothing_is_a_page() -> None:
    empty = sample_plan(placements={}, collectives=(), choices=(), memory=type(sample_plan().memory)())
    read = Page(page(empty))
    assert "12.3 ms, no collectives" in read.words
    assert read.figures == {}


def test_the_parts_of_the_bar_add_up_to_the_step() -> None:
    plan = planned_gpt()
    parts = re.findall(r'style="flex: (\d+); background', step_bar(plan))
    # Parts of less than a ten thousandth are left out.
    assert sum(map(int, parts)) == pytest.approx(1e9 * plan.step_seconds, rel=1e-3)
    assert step_bar(sample_plan()) == ""


def test_activations_that_are_saved_are_listed_by_operator_and_line() -> None:
    plan = planned_gpt()
    (fold,) = saved_by_operator(plan)
    assert isinstance(fold, Fold)
    assert sum(row.count * row.bytes for row in plan.memory.saved) == plan.memory.held["saved"]
    products = next(row for row in plan.memory.saved if row.operator == "aten.gelu.default")
    assert re.fullmatch(r".*basic\.py:\d+ \(return x \+ self.dropout\(self.mlp\(.*\)", products.line)
    assert f"<code>{products.line}</code>" in str(fold.parts[0])
