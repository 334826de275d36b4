"""The renderers of a report: text, notebook and page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.report import (
    Bar,
    Column,
    Fact,
    Facts,
    Note,
    Report,
    Section,
    Share,
    Table,
    names,
    numbers,
    text,
    texts,
)
from tests.notebooks import NotebookPage, shown
from tests.plans.pages import Page

UNSAFE = "<script>alert('a' & \"b\")</script>"


def report() -> Report:
    """Return a report with every kind of part."""
    facts = Facts.of([Fact("step", "12 ms", "2 collectives", is_key=True), ("method", "[exact]"), ("nothing", "")])
    placed = Column("dp", "placement")
    table = Table.of((*names("name"), placed, *numbers("count")), [("a.b", "S(0)", "1"), ("<b>", "P(sum)", "20")])
    bar = Bar((Share("compute", 1.0, "1 s", "forward"),))
    detail = Section.detail("Detail", [Note("hidden")])
    return Report("A title", (facts, Section("Rows", (table, bar, Note("at a\n  at b"))), detail, Section("None", ())))


def test_text_has_all_but_details_in_order() -> None:
    words = str(report()).replace("─", "").split()
    first = ["A", "title", "step", "12", "ms", "(2", "collectives)", "method", "[exact]"]
    assert words == [
        *first,
        "Rows",
        "name",
        "dp",
        "count",
        "a.b",
        "S(0)",
        "1",
        "<b>",
        "P(sum)",
        "20",
        "at",
        "a",
        "at",
        "b",
    ]


def test_a_terminal_says_what_the_text_says() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(report())
    printed = console.file.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", printed).split() == str(report()).split()
    assert "\x1b[36mS(0)\x1b[0m" in printed


def test_a_notebook_says_what_the_text_says() -> None:
    page = shown(report())
    assert page.rows == [
        ["step", "12 ms (2 collectives)"],
        ["method", "[exact]"],
        ["name", "dp", "count"],
        ["a.b", "S(0)", "1"],
        ["<b>", "P(sum)", "20"],
    ]
    assert (page.tags["table"], page.tags["thead"], page.tags["th"], page.tags["b"]) == (2, 1, 3, 0)


def test_a_page_holds_the_whole_tree(tmp_path: Path) -> None:
    report().to_html(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert page.report == json.loads(report().to_json())
    assert {"A title", "hidden", "<b>", "compute"} <= set(page.words)
    # Fields of a default are left out.
    assert page.report["parts"][0]["rows"][1] == {"type": "Fact", "label": "method", "value": "[exact]"}


def test_all_text_is_escaped() -> None:
    unsafe = Report(UNSAFE, (Facts.of([(UNSAFE, UNSAFE)]), Table.of(texts(UNSAFE), [(UNSAFE,)]), Note(UNSAFE, "bold")))
    html = unsafe._repr_html_()
    assert "<script" not in html
    assert NotebookPage(html).text.count(UNSAFE) == 6
    page = unsafe.to_html()
    assert UNSAFE not in page
    assert Page(page).words.count(UNSAFE) == 6


def test_rows_that_text_leaves_out_are_in_the_page() -> None:
    rows = [(f"n{number}", "1") for number in range(40)]
    table = Table.of((*names("name"), *numbers("count")), rows, rest=("...", "10"))
    report = Report("", (table,))
    lines = [line.split() for line in str(report).splitlines()[2:]]
    assert lines == [*([f"n{number}", "1"] for number in range(30)), ["...", "10"]]
    assert len(Page(report.to_html()).tables[0]["rows"]) == 40


def luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2.2 define it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_of_notebooks_can_be_read_on_light_and_dark_pages(background: str) -> None:
    colours = re.findall(r"color: (#\w{6})", report()._repr_html_())
    assert len(colours) == 2
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) > 4


def test_long_names_break_behind_dots() -> None:
    table = Table.of(names("name"), [("model.layers.3.self_attn.q_proj.weight",)])

    def lines(width: int) -> list[str]:
        return [line.strip() for line in text.plain("", [table], width).splitlines()[2:]]

    assert lines(18) == ["model.layers.3.", "self_attn.", "q_proj.weight"]
    assert lines(60) == ["model.layers.3.self_attn.q_proj.weight"]
