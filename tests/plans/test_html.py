from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.plans.html import Figure, Fold, HasPage, Section, View, document
from tests.plans.pages import Page
from tests.sample_plan import sample_plan

POINTS = {"type": "scatter", "x": [1, 2], "y": [3, 4], "name": "</script><b>"}
FIGURE = Figure("points", "two points", (View("points", [POINTS], {}),), 100, fallback="<p>no picture</p>")


@pytest.fixture
def without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_a_figure_is_data_for_the_script_of_the_page() -> None:
    text = document("a & b", "<p>lead</p>", [Section("Two points", ["<p>1</p>", Fold("more", [FIGURE])])])
    page = Page(text)
    assert page.figures["points"]["views"] == [{"label": "points", "data": [POINTS], "layout": {}}]
    assert {"a & b", "lead", "Two points", "more"} <= set(page.words)
    assert "no picture" not in page.words


def test_a_page_without_figures_has_no_script() -> None:
    text = document("title", "", [Section("Table", ["<p>1</p>"]), Section("Nothing", ["", ""])])
    assert "<script" not in text
    assert Page(text).links == ["#table"]


@pytest.mark.usefixtures("without_plotly")
def test_without_plotly_a_page_has_its_tables_and_says_how_to_get_charts() -> None:
    text = document("title", "", [Section("Points", [FIGURE, "<p>a table</p>"])])
    words = " ".join(Page(text).words)
    assert "<script" not in text
    assert "pip install 'autoshard[html]'" in words
    assert "no picture" in words
    assert "a table" in words


def test_a_page_is_returned_or_written(tmp_path: Path) -> None:
    class Word(HasPage):
        def _page(self) -> str:
            return "word"

    assert Word().to_html() == "word"
    Word().to_html(tmp_path / "word.html")
    assert (tmp_path / "word.html").read_text("utf-8") == "word"


@pytest.mark.usefixtures("without_plotly")
def test_the_page_of_a_plan_without_plotly() -> None:
    words = Page(sample_plan().to_html()).words
    for word in ("h.*.attn.qkv.weight", "S(0,f=3)", "all_reduce", "aten.mm", "input_ids", "optimizer 2.0 GiB"):
        assert word in words
