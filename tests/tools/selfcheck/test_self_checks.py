"""Every check is right where the library is, and finds a fault that is put in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoshard.tools.selfcheck.__main__ import run
from autoshard.tools.selfcheck.outcome import CheckLine, CheckOutcome, Processes
from autoshard.tools.selfcheck.self_checks import CHECKS, SelfCheck
from autoshard.tools.selfcheck.step_profile import StepProfile
from tests.tools.selfcheck.faults import FAULTS
from tests.workers import Workers

NAMES = [check.name for check in CHECKS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Workers]:
    """Two processes whose groups are the self-check's own."""
    with Workers(2) as started:
        yield started


def processes(folder: Path, timeout: float = 60.0) -> Processes:
    """This process among two; the group that it was started with ends."""
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    return Processes(store, int(os.environ["RANK"]), 2, torch.device("cpu"), timeout)


def checked(names: list[str], fault: str | None, folder: Path) -> list[CheckLine]:
    """Lines of these checks, in a library with a fault."""
    here = processes(folder)
    try:
        with contextlib.nullcontext() if fault is None else FAULTS[fault]():
            return run(here, [check for check in CHECKS if check.name in names])
    finally:
        here.stop()


def test_a_fault_is_known_for_every_check() -> None:
    assert list(FAULTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_check_is_right_and_finds_its_fault(name: str, ranks: Workers, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    right, wrong = ranks.run(checked, [name], None, tmp_path), ranks.run(checked, [name], name, tmp_path / "broken")
    for lines in right:
        assert [line.outcome.verdict for line in lines] in (["ok"], ["skipped"] if name == "compiled" else ["ok"]), (
            lines
        )
    if right[0][0].outcome.verdict == "ok":
        for lines in wrong:
            assert [(line.name, line.outcome.verdict) for line in lines] == [(name, "wrong")], lines


def failing(here: Processes) -> CheckOutcome:
    """Raises on one rank, while the other waits for it."""
    if here.rank == 1:
        raise ValueError("no such kernel")
    dist.barrier()
    return CheckOutcome("ok", "")


def adding(here: Processes) -> CheckOutcome:
    """Needs a group that works."""
    total = torch.ones(())
    dist.all_reduce(total)
    return CheckOutcome("ok" if total == 2 else "wrong", f"{total}")


def one_rank_fails(folder: Path) -> list[CheckLine]:
    here = processes(folder)
    try:
        return run(here, [SelfCheck("failing", failing), SelfCheck("adding", adding)])
    finally:
        here.stop()


def test_a_failure_on_one_rank_is_told_and_the_others_go_on(ranks: Workers, tmp_path: Path) -> None:
    for first, second in ranks.run(one_rank_fails, tmp_path):
        assert first.outcome.verdict == "wrong"
        assert first.outcome.figure.startswith("rank 1: ValueError: no such kernel (test_self_checks.py:")
        assert second.outcome == CheckOutcome("ok", "2.0")


def one_rank_is_lost(folder: Path) -> list[CheckLine]:
    here = processes(folder, timeout=1.0)
    checks = [SelfCheck("alone", lambda _: CheckOutcome("ok", "")), SelfCheck("adding", adding)]
    try:
        return run(here, [] if here.rank == 1 else checks)
    finally:
        here.stop()


def test_a_lost_rank_ends_the_check(ranks: Workers, tmp_path: Path) -> None:
    first, second = ranks.run(one_rank_is_lost, tmp_path)[0]
    assert first.outcome.verdict == "wrong"
    assert "rank 1 said nothing for 5 s" in first.outcome.figure
    assert second.outcome.verdict == "skipped"


def profiled(folder: Path) -> list[CheckLine]:
    here = processes(folder)
    try:
        return run(here, StepProfile().checks())
    finally:
        here.stop()


def test_a_profile_on_cpus_says_what_it_cannot_measure(ranks: Workers, tmp_path: Path) -> None:
    seconds, *others = ranks.run(profiled, tmp_path)[0]
    assert seconds.outcome.verdict == "ok"
    assert seconds.outcome.values["measured"] > 0
    assert seconds.outcome.values["predicted"] > 0
    assert [line.outcome.verdict for line in others] == ["skipped"] * 4
