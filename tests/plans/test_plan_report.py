from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from torch.distributed.tensor import Replicate

from autoshard.errors import PlanError
from autoshard.plans.expenses import count_rerun
from autoshard.plans.plan_data import Collective, Decision
from autoshard.plans.plan_tables import collective_rows, tensor_table
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.report import Bar, Fact, Facts, Part, Section, Table, text
from autoshard.units import format_seconds
from tests.plans.pages import Page
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (3.2e-5, "32 µs"), (0.0123, "12.3 ms"), (1.0, "1 s"), (75.44, "75.4 s")],
)
def test_seconds_are_written_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_rows_count_every_parameter_once() -> None:
    plan = sample_plan()
    table = tensor_table(plan.mesh.names, plan.placements, plan.shapes, plan.gathered)
    assert sum(int(row[1]) for row in table.rows) == len(plan.placements)


def test_work_of_one_module_is_added_before_layers_are_put_together() -> None:
    sent = [
        Collective("all_reduce", "tp", 10, count, f"h.{layer}", "forward", 1.0)
        for layer, count in ((0, 1), (0, 2), (1, 3), (2, 5))
    ]
    rows = collective_rows(sent)
    assert [(row.module, row.count, row.bytes, row.seconds) for row in rows] == [
        ("h.{0-1}", 6, 60, 6.0),
        ("h.2", 5, 50, 5.0),
    ]


def test_the_totals_of_rows_are_the_totals_of_the_plan() -> None:
    plan = sample_plan()
    rows = collective_rows(plan.collectives)
    assert sum(row.count for row in rows) == sum(one.count for one in plan.collectives)
    assert sum(row.bytes for row in rows) == sum(one.count * one.bytes for one in plan.collectives)


def line(text: str, start: str) -> list[str]:
    """The words of the one line that starts so."""
    (result,) = (row for row in text.splitlines() if row.strip().startswith(start))
    return result.split()


def test_the_table_tells_mesh_step_and_memory() -> None:
    text = str(sample_plan())
    assert "dp=2, tp=4 (8 devices on cluster h100)" in text
    assert "12.3 ms" in text
    assert "peak 4.5 GiB (parameters 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB, activations 512.0 MiB)" in text
    assert "may be up to 2.5 % slower than the best" in text


def test_layers_placed_alike_take_one_row() -> None:
    text = str(sample_plan())
    assert line(text, "h.*.attn.qkv.weight") == ["h.*.attn.qkv.weight", "6", "192x64", "R", "S(0,f=3)", "never"]
    assert line(text, "h.{0-3}.mlp.up.weight")[-3:] == ["R", "S(0)", "never"]
    assert line(text, "h.{4-5}.mlp.up.weight")[-3:] == ["S(1)", "S(0)", "never"]
    assert line(text, "input_ids") == ["input_ids", "1", "S(0)", "R"]


def test_collectives_are_summed_over_layers() -> None:
    text = str(sample_plan())
    assert line(text, "all_reduce") == ["all_reduce", "tp", "forward", "h.*.mlp", "6", "6.0", "MiB", "600", "µs"]
    assert line(text, "all_gather") == ["all_gather", "dp", "backward", "(root)", "3", "12.0", "KiB", "6", "ms"]


def test_the_dearest_collectives_come_first_and_the_rest_is_summed_up() -> None:
    many = tuple(Collective("all_reduce", "tp", 1, 1, f"part{'x' * i}", "forward", 1e-3 * i) for i in range(40))
    rows = [
        row
        for row in str(sample_plan(collectives=many)).splitlines()
        if ("part" in row and "R:" not in row) or "more" in row
    ]
    assert len(rows) == 31
    assert f"part{'x' * 39} " in rows[0]
    assert rows[-1].split() == ["...", "10", "more", "10", "10", "B", "45", "ms"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    report = sample_plan().report()
    assert max(map(len, text.plain(report.title, report.parts, width).splitlines())) <= width


def test_text_in_brackets_is_not_markup() -> None:
    plan = sample_plan(input_placements={"args[0]": sample_plan().input_placements["input_ids"]})
    assert line(str(plan), "args[0]") == ["args[0]", "1", "S(0)", "R"]


def test_a_plan_tells_which_parameters_are_gathered_and_which_layers_recomputed() -> None:
    again = {f"h.{layer}.mlp.up.weight": "again" for layer in range(4)}
    whole = sample_plan().placements | {"norm.weight": (Replicate(), Replicate())}
    plan = sample_plan(
        placements=whole, gathered={**again, "embed.weight": "once"}, recomputed=tuple(f"h.{n}" for n in range(5))
    )
    text = str(plan)
    assert line(text, "h.{0-3}.mlp.up.weight")[-1] == "again"
    assert line(text, "h.{4-5}.mlp.up.weight")[-1] == "never"
    assert line(text, "embed.weight")[-1] == "once"
    assert line(text, "norm.weight")[-1] == "whole"
    assert "5 layers: h.0, h.1, ..., h.4" in text
    assert "h.0, h.1" in str(sample_plan(recomputed=("h.0", "h.1")))


def test_a_plan_counts_the_operators_that_run_again_without_views() -> None:
    choices = tuple(
        Decision(node, operator, "", "forward", "", seconds)
        for node, operator, seconds in [("mul_1", "aten.mul", 1e-5), ("mul_2", "aten.mul", 1e-5), ("t", "aten.t", 0.0)]
    )
    plan = sample_plan(choices=choices, recomputed=("mul_1", "mul_2", "t"))
    assert "2 operators: 2 of aten.mul" in str(plan)
    assert count_rerun([plan]) == "2 operators"
    assert count_rerun([sample_plan(recomputed=("h.0", "h.1"))]) == "2 layers"
    assert count_rerun([sample_plan()]) == "0 layers"


def test_a_plan_of_nothing_prints() -> None:
    plan = sample_plan(placements={}, collectives=(), choices=(), cost=0.0, cluster="", timings={}, hints={})
    assert "no collectives" in str(plan)
    assert "nothing to choose" in str(plan)


def test_explain_tells_placement_operators_hints_and_collectives() -> None:
    text = sample_plan().explain("h.*.mlp")
    assert line(text, "h.{0-3}.mlp.up.weight")[-3:] == ["R", "S(0)", "never"]
    assert "h.*.attn" not in text
    assert "pinned by the hint 'h.*.mlp': tp: S(0)" in text
    assert "S(0) R, R S(1) -> S(0) S(1)" in text
    assert "predicted: operators 180 µs, collectives 600 µs" in text
    assert "all_gather" not in text


def test_explain_of_a_module_takes_what_is_below_it() -> None:
    text = sample_plan().explain("h.2")
    assert "h.2.attn.qkv.weight" in text
    assert "h.2.mlp.up.weight" in text
    assert "h.3" not in text
    assert line(text, "aten.mm")[-3:] == ["1", "30", "µs"]


def test_explain_of_a_parameter_without_collectives_says_so() -> None:
    assert "no collectives here" in sample_plan().explain("embed.weight")


def test_explain_of_nothing_suggests_close_names() -> None:
    with pytest.raises(PlanError, match=r"nothing in the plan is at 'h\.\*\.mpl'.*Close ones are .*mlp"):
        sample_plan().explain("h.*.mpl")


def printed(table: object, **options: object) -> str:
    console = Console(file=io.StringIO(), width=120, **options)
    console.print(table)
    return console.file.getvalue()


def test_the_terminal_says_what_the_text_says() -> None:
    plan = sample_plan()
    assert printed(plan).split() == str(plan).split()


def test_an_explanation_says_what_the_text_says() -> None:
    plan = sample_plan()
    assert printed(plan.explanation("h.*.mlp")).split() == plan.explain("h.*.mlp").split()


def test_sharded_placements_are_coloured() -> None:
    text = printed(sample_plan(), force_terminal=True, color_system="standard")
    assert "\x1b[36mS(0,f=3)\x1b[0m" in text


def part_of(plan: ShardingPlan, title: str) -> tuple[Part, ...]:
    """Return the parts of the section of a title."""
    (section,) = (part for part in plan.report().parts if isinstance(part, Section) and part.title == title)
    return section.parts


def test_the_page_holds_what_the_plan_says() -> None:
    read = Page(sample_plan().to_html())
    for word in ("h.*.attn.qkv.weight", "S(0,f=3)", "all_reduce", "aten.mm", "input_ids", "optimizer", "2.0 GiB"):
        assert word in read.words
    # A plan of an older version has no replay, and no chart of its step.
    assert set(read.charts) == {"modules", "collectives-by-module"}


def test_the_page_loads_nothing() -> None:
    page = sample_plan().to_html()
    assert Page(page).links == []
    assert "default-src 'none'" in page
    # The step is a trace for Perfetto, too.
    assert Page(planned_gpt().to_html()).links == ["https://ui.perfetto.dev"]


def test_text_of_the_plan_is_escaped() -> None:
    read = Page(sample_plan(hints={"<script>": "a & b"}).to_html())
    assert "<script>: a & b" in read.words


def test_a_plan_of_nothing_is_a_page() -> None:
    empty = sample_plan(placements={}, collectives=(), choices=(), memory=type(sample_plan().memory)())
    read = Page(empty.to_html())
    assert "no collectives" in read.words
    assert read.charts == {}


def test_the_parts_of_the_bar_add_up_to_the_step() -> None:
    plan = planned_gpt()
    (bar,) = (part for part in part_of(plan, "Step") if isinstance(part, Bar))
    # Parts of less than a ten thousandth are left out.
    assert sum(share.amount for share in bar.shares) == pytest.approx(plan.step_seconds, rel=1e-3)
    # A plan of an older version does not know its calls.
    assert "Step" not in [part.title for part in sample_plan().report().parts if isinstance(part, Section)]


def test_activations_that_are_saved_are_listed_by_operator_and_line() -> None:
    plan = planned_gpt()
    (fold,) = (part for part in part_of(plan, "Memory at the peak") if isinstance(part, Section))
    (table,) = fold.parts
    assert fold.is_folded
    assert isinstance(table, Table)
    assert sum(row.count * row.bytes for row in plan.memory.saved) == plan.memory.held["saved"]
    products = next(row for row in plan.memory.saved if row.operator == "aten.gelu.default")
    assert re.fullmatch(r".*basic\.py:\d+ \(return x \+ self.dropout\(self.mlp\(.*\)", products.line)
    assert products.line in {row[2] for row in table.rows}


def facts_of(plan: ShardingPlan) -> dict[str, Fact]:
    """Return the facts at the head of a plan by label."""
    (facts,) = (part for part in plan.report().parts if isinstance(part, Facts))
    return {fact.label: fact for fact in facts.rows}


def test_what_is_wrong_with_a_plan_is_an_alarm() -> None:
    late = "messages, ended by time_limit=3 s: a longer search may find a faster plan"
    assert facts_of(sample_plan(method=late))["search"].is_alarm
    assert not facts_of(sample_plan())["search"].is_alarm
    large = facts_of(sample_plan(options={"memory_limit": 2**30}))["memory per device"]
    assert large.is_alarm
    assert large.value == "peak 4.5 GiB of 1.0 GiB: does not fit"
