"""The lines of the self-check as a table, and as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.selfcheck.outcome import VERDICTS, CheckLine, Verdict
from autoshard.version import __version__

_STYLES = {"ok": "green", "skipped": "dim", "slow": "yellow", "wrong": "bold red"}


def verdict_of(lines: Sequence[CheckLine]) -> Verdict:
    """Return the worst verdict of all lines."""
    return max((line.outcome.verdict for line in lines), key=VERDICTS.index, default="ok")


def result_table(lines: Sequence[CheckLine], machine: str, seconds: float) -> Group:
    """Return the lines for a terminal, with the machine above and the counts of verdicts below."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("check", no_wrap=True)
    rows.add_column("verdict", no_wrap=True)
    rows.add_column("figure", overflow="fold", ratio=3)
    rows.add_column("what to do", overflow="fold", ratio=2)
    for line in lines:
        outcome = line.outcome
        styled = Text(outcome.verdict, style=_STYLES[outcome.verdict])
        rows.add_row(Text(line.name), styled, Text(outcome.figure), Text(outcome.advice))
    verdicts = [line.outcome.verdict for line in lines]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts)
    return Group(Text(f"autoshard {__version__} on {machine}"), rows, Text(f"{counts}, in {seconds:.0f} s"))


def result_data(lines: Sequence[CheckLine], machine: str, seconds: float) -> dict[str, Any]:
    """Return the lines for a file of JSON, in which a number that is not finite is null."""
    return {
        "autoshard": __version__,
        "torch": torch.__version__,
        "machine": machine,
        "seconds": seconds,
        "verdict": verdict_of(lines),
        "lines": [
            {
                "check": line.name,
                "seconds": line.seconds,
                "verdict": line.outcome.verdict,
                "figure": line.outcome.figure,
                "advice": line.outcome.advice,
                "values": {
                    name: value if math.isfinite(value) else None for name, value in line.outcome.values.items()
                },
            }
            for line in lines
        ],
    }
