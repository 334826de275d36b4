from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.memory import by_size, smallest_feasible_k


def test_equal_sizes_come_in_the_order_of_their_names() -> None:
    assert by_size({"b": 5, "c": 9, "a": 5}) == ("c", "a", "b")


@given(st.integers(0, 40), st.integers(0, 41))
def test_the_smallest_k_is_found_without_trying_any_twice(count: int, needed: int) -> None:
    sizes = {f"w{index:02}": 100 - index for index in range(count)}
    tried: list[int] = []

    def fits(forced: frozenset[str]) -> str | None:
        assert forced == frozenset(by_size(sizes)[: len(forced)])
        tried.append(len(forced))
        return f"plan {len(forced)}" if len(forced) >= needed else None

    assert smallest_feasible_k(sizes, fits) == ((needed, f"plan {needed}") if needed <= count else None)
    assert len(set(tried)) == len(tried)
    assert len(tried) <= 2 * (needed + 1).bit_length() + 2


def test_without_parameters_only_the_free_plan_is_tried() -> None:
    assert smallest_feasible_k({}, lambda forced: None) is None
    assert smallest_feasible_k({}, lambda forced: 7) == (0, 7)
