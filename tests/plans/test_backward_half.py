"""The report of what the backward half has from where: its rows, and the places that show them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest

from autoshard.memory.footprint import SOURCES, Memory
from autoshard.planner.planning import plan_with_recompute
from autoshard.plans.backward_half import (
    layer_rows,
    module_rows,
    rerun_decisions,
    sources_of,
    sources_parts,
)
from autoshard.plans.plan_report import sources_section
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.report import Note, Table
from tests.planner.steps import joint_graph, planner_of
from tests.plans.pages import Page
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan

LAYERS = 6
TITLE = "What the backward half reads"


@functools.cache
def _limited() -> ShardingPlan:
    """Return the plan of a GPT of six layers on one device, within seven tenths of what it holds without a limit."""
    graph = joint_graph("gpt", layers=LAYERS)
    peak = planner_of(graph, {"x": 1}).plan().memory.peak
    return plan_with_recompute(planner_of(graph, {"x": 1}, memory_limit=peak * 7 // 10))


def _cells(plan: ShardingPlan) -> tuple[tuple[str, ...], ...]:
    """Return the rows of the table of a plan."""
    table, _ = sources_parts(layer_rows(sources_of([plan])))
    assert isinstance(table, Table)
    return table.rows


def test_rows_add_up_to_the_plan() -> None:
    plan = _limited()
    sources = sources_of([plan])
    for rows in (layer_rows(sources), module_rows(sources)):
        for source in SOURCES:
            held = sum(sizes.get(source, 0) for sizes in plan.memory.sources.values())
            assert sum(row.sources.bytes[source] for row in rows) == held
        seconds = sum(row.sources.seconds for row in rows)
        assert seconds == pytest.approx(sum(choice.seconds for choice in rerun_decisions(plan)), rel=1e-12)
        assert seconds > 0


def test_what_runs_again_is_what_the_plan_says() -> None:
    plan = _limited()
    again = rerun_decisions(plan)
    # An operator that the plan names may be read by nobody.
    assert {choice.node.removesuffix("_again") for choice in again} <= {*plan.recomputed}
    total = sum((row.sources.operators for row in layer_rows(sources_of([plan]))), Counter[str]())
    assert total.total() == sum(choice.seconds > 0 for choice in again) > 0
    assert total["gelu"] == sum(choice.operator == "aten.gelu" for choice in again) > 0


def test_layers_that_do_alike_are_one_row() -> None:
    rows = layer_rows(sources_of([_limited()]))
    layers = [row for row in rows if row.text.startswith("layers.")]
    assert sum(row.count for row in layers) == LAYERS > len(layers)
    assert not any(row.text.startswith("layers") for row in rows if row not in layers)
    # The first layers are freed, since they would be kept longest.
    assert layers[0].sources.bytes["saved"] / layers[0].count <= layers[-1].sources.bytes["saved"] / layers[-1].count


def test_layers_that_run_again_whole_are_counted_too() -> None:
    plan = plan_with_recompute(planner_of(joint_graph("gpt"), {"x": 4}, recompute="full"))
    assert plan.recomputed == ("layers.0", "layers.1")
    (row,) = (row for row in layer_rows(sources_of([plan])) if row.text == "layers.*")
    assert row.sources.operators["gelu"] == row.count == 2


def test_a_plan_within_a_limit_shows_them_and_so_does_its_file() -> None:
    plan = _limited()
    for shown in (str(plan), str(ShardingPlan.from_json(plan.to_json()))):
        _, table = shown.split(TITLE)
        for row in _cells(plan):
            assert any(line.split()[:1] == [row[0]] and row[-1] in line for line in table.splitlines())
    unlimited = planned_gpt()
    assert TITLE not in str(unlimited)
    assert TITLE in str(dataclasses.replace(unlimited, options={"memory_limit": 2**30}))


def test_a_part_of_a_plan_is_explained_by_modules() -> None:
    plan = _limited()
    _, table = plan.explain("layers.0").split(TITLE)
    mine = {path: one for path, one in sources_of([plan]).items() if path.startswith("layers.0.")}
    rows = module_rows(mine)
    assert len(rows) > 1
    for row in rows:
        assert row.text.rpartition(".")[2] in table


def test_the_page_has_a_row_for_every_layer() -> None:
    plan = _limited()
    words = Page(plan.to_html()).words
    assert TITLE in words
    for row in _cells(plan):
        assert {cell for cell in row if cell} <= {*words}


def test_a_table_has_the_columns_that_hold_something() -> None:
    sources = {f"h.{layer}.mlp": {"saved": 1024, "host": 2048} for layer in range(6)} | {"": {"saved": 512}}
    plan = sample_plan(offloaded=("mm_0",), memory=Memory(sources=sources))
    rows = layer_rows(sources_of([plan]))
    table, legend = sources_parts(rows)
    assert isinstance(table, Table)
    assert [column.label for column in table.columns] == ["module", "count", "kept", "on the host"]
    assert table.rows == (
        ("h.*", "6", "6.0 KiB", "12.0 KiB"),
        ("(root)", "1", "512 B", ""),
        ("together", "7", "6.5 KiB", "12.0 KiB"),
    )
    assert isinstance(legend, Note)
    assert legend.text.endswith("On the host: moved there, and back.")
    assert "again" not in legend.text


def test_nothing_is_said_of_a_plan_of_an_older_version() -> None:
    old = sample_plan(options={"memory_limit": 2**30})
    assert not old.memory.sources
    assert sources_section([old]).parts == ()
    assert TITLE not in Page(old.to_html()).words
