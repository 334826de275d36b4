"""Bytes and seconds as text."""

from __future__ import annotations

import re

from autoshard.errors import BudgetError

_UNITS = {
    "B": 1,
    # SI writes kB, many tools KB.
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_AMOUNT = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_bytes(amount: str | int | float) -> int:
    """Return the bytes of `"24GiB"`, `"80 GB"`, or a number of bytes.

    Raises:
        BudgetError: the text is not an amount with a unit, or the amount is below one byte or not finite.
    """
    # A bool is an int in Python.
    if isinstance(amount, bool) or not isinstance(amount, (str, int, float)):
        raise BudgetError(f'an amount of memory is a number of bytes or a text such as "24GiB", not {amount!r}.')
    size = _parse_text(amount) if isinstance(amount, str) else amount
    # NaN fails every comparison.
    if not 1 <= size < float("inf"):
        raise BudgetError(f"an amount of memory of {amount!r} is no budget: it must be at least one byte, and finite.")
    return int(size)


def _parse_text(text: str) -> float:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise BudgetError(f'{text!r} is not an amount of memory: write a number and a unit, such as "24GiB" or "80GB".')
    unit = match["unit"]
    if unit not in _UNITS:
        fault = f"has the unit {unit!r}" if unit else "has no unit"
        raise BudgetError(
            f"the amount of memory {text!r} {fault}: the units are {', '.join(_UNITS)} "
            f"(GB is 1000 MB, GiB is 1024 MiB). A number that is not a text is in bytes."
        )
    return float(match["number"]) * _UNITS[unit]


def format_bytes(amount: float) -> str:
    """Return `"31.4 GiB"`: bytes in the largest binary unit with a value of at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(amount) >= _UNITS[unit]:
            return f"{amount / _UNITS[unit]:.1f} {unit}"
    return f"{amount:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return `"12.3 ms"`: seconds in the largest unit with a value of at least 1."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def byte_unit(amount: float) -> tuple[str, int]:
    """Return the binary unit in which `format_bytes` writes an amount, and the bytes of the unit."""
    name = format_bytes(amount).split()[1]
    return name, _UNITS[name]


def second_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which `format_seconds` writes a time, and the seconds of the unit."""
    name = format_seconds(seconds).split()[1]
    return name, {"s": 1.0, "ms": 1e-3}.get(name, 1e-6)
