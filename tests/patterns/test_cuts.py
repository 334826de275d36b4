from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.patterns.cuts import Worklist

NUMBERS = st.lists(st.integers(0, 9))


@given(NUMBERS, st.dictionaries(st.integers(0, 9), NUMBERS))
def test_it_is_a_dictionary_whose_first_key_is_taken_out(first: list[int], then: dict[int, list[int]]) -> None:
    waiting, expected = dict.fromkeys(first), []
    left = {number: list(more) for number, more in then.items()}
    while waiting:
        expected.append(next(iter(waiting)))
        del waiting[expected[-1]]
        waiting.update(dict.fromkeys(left.pop(expected[-1], [])))
    left, found = {number: list(more) for number, more in then.items()}, []
    worklist = Worklist(first)
    for number in worklist:
        found.append(number)
        worklist.add(left.pop(number, []))
    assert found == expected
