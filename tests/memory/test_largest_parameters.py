from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.memory import largest_names, names_by_size


def test_equal_sizes_come_in_the_order_of_their_names() -> None:
    assert names_by_size({"b": 5, "c": 9, "a": 5}) == ("c", "a", "b")


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9)), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_what_a_smaller_one_has(sizes: dict[str, int], some: float, other: float) -> None:
    few, many = (largest_names(sizes, share) for share in sorted((some, other)))
    assert few <= many == frozenset(names_by_size(sizes)[: len(many)])
    assert largest_names(sizes, 1.0) == frozenset(sizes)
    assert len(largest_names(sizes, 0.0)) == min(len(sizes), 1)
