"""The outcome of a check, on one rank and on all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autoshard.version import __version__

Verdict = Literal["ok", "skipped", "slow", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("ok", "skipped", "slow", "wrong")
"""From the best to the worst."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check.

    Attributes:
        verdict: `"ok"`; `"slow"`: right, but slower or larger than predicted; `"wrong"`; or `"skipped"`.
        figure: the number behind the verdict, or the reason, as text.
        advice: for the user; empty where there is nothing to do.
        values: the numbers in the figure, by name; seconds, bytes and relative differences.
        ratio: the worst of the numbers over its limit, if there is one.
        failure: of a check that raised, the position of this rank among those that failed, by time; else None.
    """

    verdict: Verdict
    figure: str
    advice: str = ""
    values: dict[str, float] = field(default_factory=dict)
    ratio: float = 0.0
    failure: int | None = None

    def to_json(self) -> str:
        """Return the outcome as text, for other ranks."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class CheckLine:
    """A row of the table: the name of a check, its outcome on all ranks, and the seconds that it took."""

    name: str
    outcome: CheckOutcome
    seconds: float = 0.0


def worst_outcome(outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Return the outcome that stands for all ranks.

    That is the first failure, else the worst verdict, and of equal verdicts the largest ratio. Of several ranks, a
    wrong one is named.
    """
    # A rank that failed may have left others waiting, which fail in turn: their failures say nothing.
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]

    def badness(rank: int) -> tuple[bool, int, float]:
        outcome = outcomes[rank]
        first = bool(failures) and outcome.failure == min(failures)
        return first, VERDICTS.index(outcome.verdict), outcome.ratio

    # The first of equal ranks, on every rank: all report the same outcome.
    rank = max(range(len(outcomes)), key=badness)
    worst = outcomes[rank]
    figure = f"rank {rank}: {worst.figure}" if worst.verdict == "wrong" and len(outcomes) > 1 else worst.figure
    return CheckOutcome(worst.verdict, figure, worst.advice, worst.values, worst.ratio, worst.failure)


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
                    # JSON has no infinity: readers other than Python's refuse it.
                    name: value if math.isfinite(value) else None
                    for name, value in line.outcome.values.items()
                },
            }
            for line in lines
        ],
    }
