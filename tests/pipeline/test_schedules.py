from __future__ import annotations

from pathlib import Path

import pytest

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Schedule
from autoshard.pipeline.schedule.schedule_messages import runtime_actions
from autoshard.pipeline.schedule.schedules import SCHEDULES, schedule
from tests.pipeline._torch import run_csv_schedule, run_schedule
from tests.pipeline.cases import sizes

SOME = sizes((2, 3), (1, 2), (6,))


def computations(made: Schedule) -> list[list[str]]:
    return [[str(part) for action in order for part in action.computations] for order in made.orders]


def test_all_schedules_are_met() -> None:
    assert {name for name, *_ in SOME} == set(SCHEDULES)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual"), SOME)
def test_the_order_is_the_one_in_which_torch_runs_its_class(
    name: str, ranks: int, microbatches: int, virtual: int
) -> None:
    made = schedule(name, ranks, microbatches, virtual)
    assert computations(made) == run_schedule(name, made.placement, ranks, microbatches)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual"), SOME)
def test_torch_runs_the_lists(name: str, ranks: int, microbatches: int, virtual: int, tmp_path: Path) -> None:
    made = schedule(name, ranks, microbatches, virtual)
    for rows, form in ((made.orders, "compute_only"), (runtime_actions(made), "compute_comms")):
        assert run_csv_schedule(rows, form, made.placement, ranks, microbatches, tmp_path) == computations(made)


def test_shape() -> None:
    loop, there_and_back = schedule("interleaved1f1b", 3, 6, 2), schedule("ZBVZeroBubble", 3, 6, 2)
    assert loop.name == "Interleaved1F1B"
    assert (loop.ranks, loop.stages, loop.virtual, loop.microbatches) == (3, 6, 2, 6)
    assert loop.placement == (0, 1, 2, 0, 1, 2)
    assert there_and_back.placement == (0, 1, 2, 2, 1, 0)
    assert there_and_back.splits_backward
    assert not loop.splits_backward


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "virtual", "said"),
    [
        ("1F1B", 4, 3, 1, "on 4 ranks it needs at least 4 microbatches, not 3"),
        ("GPipe", 2, 4, 2, "it needs 1 stage per rank, not 2"),
        ("Interleaved1F1B", 2, 4, 1, "it needs at least 2 stages per rank, not 1"),
        ("Interleaved1F1B", 4, 9, 2, "2 rounds of at least 4, one for every rank, which are not equal; 8 or 12"),
        ("InterleavedZeroBubble", 2, 7, 1, "6 or 8 microbatches would make equal ones"),
        ("ZBVZeroBubble", 2, 4, 3, "it needs 2 stages per rank, not 3"),
        ("DualPipeV", 4, 7, 2, "on 4 ranks it needs at least 8 microbatches, not 7"),
        ("GPipe", 0, 4, 1, "all three have to be at least 1"),
        ("Gpipes", 2, 4, 1, "there is no schedule 'Gpipes'. Close ones are"),
    ],
)
def test_refusals(name: str, ranks: int, microbatches: int, virtual: int, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        schedule(name, ranks, microbatches, virtual)
