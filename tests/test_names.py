from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.names import ancestors, group_names, matching, suggestion


def test_a_star_matches_dots_too() -> None:
    assert matching("h.*.weight", ["h.0.weight", "h.0.mlp.weight", "h.weight"]) == ("h.0.weight", "h.0.mlp.weight")


def test_ancestors_come_nearest_first() -> None:
    assert list(ancestors("a.b.c")) == ["a.b", "a"]
    assert list(ancestors("a")) == []


def test_suggestions_offer_close_names_or_any() -> None:
    assert suggestion("lm_haed.weight", ["lm_head.weight", "embed"]) == "Close ones are lm_head.weight."
    assert suggestion("???", ["d", "c", "b", "a"]) == "There are a, b, c and others."
    assert suggestion("x", []) == "There are none to choose from."


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        ({"h.0.w": 1, "h.1.w": 1, "h.2.w": 1}, ["h.*.w"]),
        ({"h.0.w": 1, "h.1.w": 2, "h.2.w": 1, "h.3.w": 1}, ["h.{0,2-3}.w", "h.1.w"]),
        ({"net.0.w": 1, "net.2.b": 1}, ["net.0.w", "net.2.b"]),
        ({"h.0.e.0.w": 1, "h.0.e.1.w": 1, "h.1.e.0.w": 1, "h.1.e.1.w": 1}, ["h.*.e.*.w"]),
        ({"": 1, "h.0": 1}, ["", "h.0"]),
        ({"layers.layer_0.w": 1, "layers.layer_1.w": 1}, ["layers.layer_*.w"]),
        ({"layer_0.w": 1, "layer_1.w": 2, "layer_2.w": 1, "norm_0.w": 1}, ["layer_{0,2}.w", "layer_1.w", "norm_0.w"]),
        ({"conv1.w": 1, "conv2.w": 1}, ["conv1.w", "conv2.w"]),
    ],
)
def test_names_that_differ_in_indices_are_put_together(items: dict[str, int], texts: list[str]) -> None:
    assert [group.text for group in group_names(items)] == texts


@given(st.dictionaries(st.integers(0, 30).map("h.{}.w".format), st.integers(0, 2)))
def test_groups_divide_the_names_by_key(items: dict[str, int]) -> None:
    groups = group_names(items)
    assert sorted(name for group in groups for name in group.names) == sorted(items)
    assert all(items[name] == group.key for group in groups for name in group.names)
    assert len(groups) == len(set(items.values()))
