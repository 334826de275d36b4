"""The processes of the self-check, one of which is this one."""

from __future__ import annotations

import io
import json
import os

import pytest
import torch.distributed as dist
from rich.console import Console

from autoshard.tools.selfcheck.outcome import (
    CheckLine,
    CheckOutcome,
    Processes,
    result_data,
    result_table,
    verdict_of,
    worst_outcome,
)


def test_the_worst_verdict_stands_for_all_ranks() -> None:
    outcomes = [
        CheckOutcome("ok", "a", ratio=0.1),
        CheckOutcome("slow", "b", ratio=2.0),
        CheckOutcome("slow", "c", ratio=3.0),
    ]
    assert worst_outcome(outcomes).figure == "c"


def test_a_wrong_rank_is_named() -> None:
    assert worst_outcome([CheckOutcome("ok", "a"), CheckOutcome("wrong", "b")]).figure == "rank 1: b"
    assert worst_outcome([CheckOutcome("wrong", "b")]).figure == "b"


def test_the_first_failure_counts_and_not_what_it_caused() -> None:
    outcomes = [CheckOutcome("wrong", "timed out", failure=2), CheckOutcome("wrong", "cause", failure=1)]
    assert worst_outcome(outcomes).figure == "rank 1: cause"


def test_an_outcome_goes_to_other_ranks_as_text() -> None:
    outcome = CheckOutcome("wrong", "figure", "advice", {"float32": float("inf")}, float("inf"), 1)
    assert CheckOutcome(**json.loads(outcome.to_json())) == outcome


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


WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("asked", [None, "0"])
def test_what_the_user_asked_of_nccl_is_put_back(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked is None:
        monkeypatch.delenv(WAIT, raising=False)
    else:
        monkeypatch.setenv(WAIT, asked)
    processes = Processes.of_job()
    processes.start()
    assert dist.is_initialized()
    assert os.environ[WAIT] == "1"
    processes.start(blocking=False)
    assert os.environ[WAIT] == "0"
    processes.stop()
    assert not dist.is_initialized()
    assert os.environ.get(WAIT) == asked
