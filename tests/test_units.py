from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import BudgetError
from autoshard.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        (" 1.5 MiB ", 3 * 2**19),
        ("7B", 7),
        ("3kB", 3000),
        ("2TiB", 2**41),
        (123, 123),
        (2.0e9, 2 * 10**9),
    ],
)
def test_amounts_are_read(amount: str | int | float, size: int) -> None:
    assert parse_bytes(amount) == size


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        ("24G", "has the unit 'G': the units are .*GiB"),
        ("24", "has no unit"),
        ("much", "'much' is not an amount of memory"),
        ("-1GB", "is not an amount"),
        ("0GB", "no budget"),
        (0, "no budget"),
        (-5, "no budget"),
        (float("inf"), "no budget"),
        (float("nan"), "no budget"),
        (None, "not None"),
        (True, "not True"),
    ],
)
def test_what_is_no_amount_is_refused(amount: object, said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        parse_bytes(amount)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (33715493273, "31.4 GiB"), (2**40, "1.0 TiB")]
)
def test_amounts_are_written(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(1, 2**50))
def test_what_is_written_can_be_read_again(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)
