"""Tables as plain text and as HTML."""

from __future__ import annotations

import re

import pytest
from rich import box
from rich.console import Group
from rich.markdown import Markdown
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.display import NameText, html, plain
from tests.notebooks import NotebookPage


def table() -> Table:
    result = Table(title="a title", box=box.SIMPLE_HEAD, title_justify="left")
    result.add_column("name")
    result.add_column(Text("count"), justify="right", no_wrap=True)
    result.add_row("first", Text("1"))
    result.add_row(Text("[second] <b>"), Text("20"))
    return result


def test_html_has_the_words_of_the_text_in_their_order() -> None:
    parts = (Group(Text("above"), Text("")), table(), Padding(Text("a: b\n    at c", style="bold"), (0, 0, 0, 2)))
    words = plain(parts, 1000).replace("─", "").split()
    assert words == [
        "above",
        "a",
        "title",
        "name",
        "count",
        "first",
        "1",
        "[second]",
        "<b>",
        "20",
        "a:",
        "b",
        "at",
        "c",
    ]
    assert NotebookPage(html(*parts)).text.split() == words


def test_a_table_is_a_table() -> None:
    page = NotebookPage(html(table()))
    assert page.rows == [["name", "count"], ["first", "1"], ["[second] <b>", "20"]]
    assert (page.tags["table"], page.tags["thead"], page.tags["th"], page.tags["td"]) == (1, 1, 2, 4)
    assert page.text.split()[:2] == ["a", "title"]
    cells = [style for style in page.styles if "text-align" in style and "caption" not in style]
    assert ["right" in style for style in cells] == [False, True] * 3
    assert ["pre-wrap" in style for style in cells] == [True, False] * 3


def test_a_table_without_head_and_title_has_none() -> None:
    facts = Table(box=None, show_header=False)
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row(Text("label"), Text("value"))
    text = html(facts)
    assert "<thead>" not in text
    assert "<caption" not in text
    assert [("font-weight: 600" in style) for style in re.findall(r'<td style="([^"]*)"', text)] == [True, False]


def test_all_text_is_escaped() -> None:
    unsafe = "<script>alert('a' & \"b\")</script>"
    unsafe_table = Table(title=Text(unsafe))
    unsafe_table.add_column(Text(unsafe))
    unsafe_table.add_row(Text(unsafe))
    text = html(unsafe_table, Text(unsafe), Text(unsafe, style="bold"))
    assert "<script" not in text
    assert NotebookPage(text).text.count(unsafe) == 5


def test_styles_of_a_text_and_of_its_parts_are_kept() -> None:
    text = Text("bold, ", style="bold").append("blue", style="not bold cyan").append(" and ", style="")
    assert re.findall(r'<span style="([^"]*)">([^<]*)</span>', html(text)) == [
        ("font-weight: 600", "bold, "),
        ("color: #0b8294", "blue"),
        ("font-weight: 600", " and "),
    ]
    assert ">grey</span>" in html(Text("grey", style="dim"))
    # Green is not known to be legible on every page.
    assert "<span" not in html(Text("green", style="green"))


def luminance(colour: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines 2.2 define it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_can_be_read_on_light_and_dark_pages(background: str) -> None:
    text = html(Text("sharded", style="cyan"), Text("partial", style="magenta"))
    colours = re.findall(r"color: (#\w{6})", text)
    assert len(colours) == 2
    for colour in colours:
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) > 4


def test_other_parts_are_refused() -> None:
    with pytest.raises(TypeError, match="no HTML for a Markdown: pass groups, tables and texts"):
        html(Markdown("a"))
    cells = Table("a")
    cells.add_row(Markdown("a"))
    with pytest.raises(TypeError, match="no HTML for a cell that is a Markdown"):
        html(cells)


def test_long_names_break_behind_dots() -> None:
    def shown(width: int) -> list[str]:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(overflow="fold")
        table.add_row(NameText("model.layers.3.self_attn.q_proj.weight"))
        return plain([table], width).splitlines()

    assert shown(16) == ["model.layers.3.", "self_attn.", "q_proj.weight"]
    assert shown(60) == ["model.layers.3.self_attn.q_proj.weight"]
