from __future__ import annotations

import io
import json

from rich.console import Console

from autoshard.selfcheck.outcome import CheckLine, CheckOutcome
from autoshard.selfcheck.result_table import result_data, result_table, verdict_of

LINES = [
    CheckLine("norms", CheckOutcome("ok", "float32 1.0e-07", values={"float32": 1e-7})),
    CheckLine(
        "pipeline", CheckOutcome("wrong", "rank 1: lost [a microbatch]", "Report it.", {"float32": float("inf")})
    ),
    CheckLine("step, seconds", CheckOutcome("slow", "3 s", "Measure.")),
]


def test_the_table_has_a_row_for_each_line_and_the_counts() -> None:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(result_table(LINES, "2 processes, CPU", 61.4))
    text = captured.get()
    for line in LINES:
        row = next(row for row in text.splitlines() if row.strip().startswith(line.name))
        assert all(part in row for part in (line.outcome.verdict, line.outcome.figure, line.outcome.advice))
    assert "2 processes, CPU" in text
    assert "1 ok, 1 slow, 1 wrong, in 61 s" in text


def test_the_data_are_json_and_hold_the_same() -> None:
    held = json.loads(json.dumps(result_data(LINES, "2 processes, CPU", 61.4), allow_nan=False))
    assert held["verdict"] == "wrong"
    assert [line["check"] for line in held["lines"]] == [line.name for line in LINES]
    assert held["lines"][0]["values"] == {"float32": 1e-7}
    assert held["lines"][1]["values"] == {"float32": None}


def test_the_verdict_is_the_worst() -> None:
    assert verdict_of(LINES) == "wrong"
    assert verdict_of(LINES[::2]) == "slow"
    assert verdict_of(LINES[:1]) == "ok"
