from __future__ import annotations

from html.parser import HTMLParser

from autoshard.plans.contents import Decision
from autoshard.plans.html import page
from tests.sample_plan import sample_plan


class Reader(HTMLParser):
    """Collects text and attributes, and checks that tags close in the order in which they open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.update(name for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_holds_what_the_plan_says() -> None:
    words = read(page(sample_plan())).words
    for word in ("h.*.attn.qkv.weight", "S(0,f=3)", "all_reduce", "aten.mm", "input_ids", "optimizer 2.0 GiB"):
        assert word in words


def test_the_page_loads_nothing() -> None:
    reader = read(page(sample_plan()))
    assert not reader.attributes & {"src", "href"}
    assert "url(" not in page(sample_plan())


def test_text_of_the_plan_is_escaped() -> None:
    text = page(sample_plan(hints={"<script>": "a & b"}))
    assert "<script>" not in text
    assert "a &amp; b" in text
    read(text)


def test_a_long_table_is_folded_up() -> None:
    many = tuple(Decision(f"n{i}", f"aten.op{i}", "m", "forward", "R -> R", 1e-6) for i in range(40))
    assert "40 rows" in read(page(sample_plan(choices=many))).words


def test_a_plan_of_nothing_is_a_page() -> None:
    empty = sample_plan(placements={}, collectives=(), choices=(), memory=type(sample_plan().memory)())
    assert "no collectives" in page(empty)
    read(page(empty))
