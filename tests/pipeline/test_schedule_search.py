"""The search for a schedule, and schedules of list scheduling."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import BudgetError, PipelineError
from autoshard.pipeline.schedule.actions import SCHEDULES, Schedule, placement, runtime_actions, schedule
from autoshard.pipeline.schedule.costs import Simulation, StageCosts, simulate
from autoshard.pipeline.schedule.schedule_search import (
    CostsOf,
    ScheduleCandidate,
    ScheduleSearch,
    bytes_for_one_microbatch,
    list_schedules,
    microbatches_to_try,
    names_to_try,
    virtual_to_try,
)
from tests.pipeline._torch import run_csv_schedule
from tests.pipeline.cases import equal_stages

RANKS = 3
BYTES = [name for name in StageCosts.__dataclass_fields__ if name.endswith("_bytes")]


def costs_of(microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
    """A batch of work that is divided, a little that every computation costs, and a last stage that takes longer."""
    if virtual > 2:
        return None
    stages, work = RANKS * virtual, 24.0 / microbatches / virtual
    return [
        StageCosts(
            forward_seconds=work * (1.5 if stage == stages - 1 else 1) + 0.02,
            input_backward_seconds=work + 0.02,
            weight_backward_seconds=work + 0.02,
            forward_send_seconds=work / 20,
            backward_send_seconds=work / 20,
            rest_bytes=200 // virtual,
            saved_bytes=int(20 * work),
            weight_saved_bytes=int(8 * work),
        )
        for stage in range(stages)
    ]


class Choice(NamedTuple):
    simulation: Simulation
    table: tuple[ScheduleCandidate, ...]

    @property
    def schedule(self) -> Schedule:
        return self.simulation.schedule


def choose(
    costs: CostsOf,
    ranks: int,
    memory: int,
    *,
    batch: int,
    schedules: str | Sequence[str] = "auto",
    microbatches: str | int = "auto",
    virtual: str | int = "auto",
    contention: float = 0.0,
) -> Choice:
    """The choice among all that may be tried; raises what the search says where nothing fits."""
    search = ScheduleSearch(costs, ranks, (memory,) * ranks, contention)
    sizes = [(m, v) for m in microbatches_to_try(microbatches, batch, ranks) for v in virtual_to_try(virtual)]
    for name in names_to_try(schedules):
        for m, v in sizes:
            search.add(name, m, v)
    search.run()
    if search.best is None:
        raise search.no_schedule_error()
    assert search.best.simulation is not None
    return Choice(search.best.simulation, search.table())


def lines(chosen: Choice) -> dict[tuple[str, int, int], str]:
    return {(line.schedule, line.microbatches, line.virtual): line.verdict for line in chosen.table}


@pytest.mark.parametrize("room", [10**6, 700, 460])
def test_nothing_that_fits_is_faster(room: int) -> None:
    chosen = choose(costs_of, RANKS, room, batch=12, schedules=list(SCHEDULES), contention=0.2)
    fitting = []
    for name, family in SCHEDULES.items():
        for m in (1, 2, 3, 4, 6, 12):
            for v in (1, 2):
                if family.refusal(RANKS, v, m) is None:
                    stages = costs_of(m, v)
                    assert stages is not None
                    result = simulate(schedule(name, RANKS, m, v), stages, 0.2)
                    if max(result.peaks) <= room:
                        fitting.append(result.seconds)
    assert chosen.simulation.seconds == pytest.approx(min(fitting), rel=1e-9)
    assert max(chosen.simulation.peaks) <= room


def test_the_table_says_why_each_other_one_lost() -> None:
    chosen = choose(costs_of, RANKS, 460, batch=12, schedules=list(SCHEDULES))
    said = lines(chosen)
    assert len(chosen.table) == len(SCHEDULES) * 6 * 4
    assert [line.verdict for line in chosen.table].count("chosen") == 1
    assert said[chosen.schedule.name, chosen.schedule.microbatches, chosen.schedule.virtual] == "chosen"
    assert said["GPipe", 12, 3] == "refused: it needs 1 stage per rank, not 3"
    assert said["LoopedBFS", 12, 3] == "refused: the model has no 9 stages"
    assert said["GPipe", 1, 1] == "rank 0 needs at least 680 B and has 460 B"
    assert all(line.verdict for line in chosen.table)
    seconds = [line.seconds for line in chosen.table if line.seconds is not None]
    assert seconds == sorted(seconds)


def test_of_equally_fast_ones_the_leaner_is_taken() -> None:
    equal = [StageCosts(forward_seconds=1, input_backward_seconds=1, weight_backward_seconds=1, saved_bytes=9)] * 2
    chosen = choose(lambda m, v: equal, 2, 10**6, batch=8, microbatches=8, virtual=1, schedules=["gpipe", "1f1b"])
    assert chosen.schedule.name == "1F1B"
    assert lines(chosen)["GPipe", 8, 1] == "as fast, with no less memory"


def test_a_schedule_of_our_own_is_taken_where_it_is_faster_by_more_than_a_hundredth() -> None:
    def sending(seconds: float) -> list[StageCosts]:
        return [
            StageCosts(
                forward_seconds=1,
                input_backward_seconds=1,
                weight_backward_seconds=1,
                forward_send_seconds=seconds,
                backward_send_seconds=seconds,
                saved_bytes=1,
            )
        ] * 4

    far = choose(lambda m, v: sending(0.6), 4, 10**6, batch=16, microbatches=16, virtual=1)
    assert far.schedule.name == "custom"
    assert far.simulation.seconds < 0.99 * min(
        line.seconds for line in far.table if line.seconds is not None and line.schedule != "custom"
    )
    near = choose(lambda m, v: sending(0.0), 4, 10**6, batch=16, microbatches=16, virtual=1)
    assert near.schedule.name != "custom"


def test_names_and_numbers_can_be_given() -> None:
    chosen = choose(costs_of, RANKS, 10**6, batch=12, schedules="zbvzerobubble", microbatches=6, virtual=2)
    assert (chosen.schedule.name, chosen.schedule.microbatches, chosen.schedule.virtual) == ("ZBVZeroBubble", 6, 2)
    assert [line.verdict for line in chosen.table] == ["chosen"]


def test_nothing_fits() -> None:
    with pytest.raises(
        BudgetError, match=r"no schedule fits: the leanest is .* rank \d needs .* and has 100 B"
    ) as raised:
        choose(costs_of, RANKS, 100, batch=12)
    assert raised.value.peak is not None
    chosen = choose(costs_of, RANKS, raised.value.peak, batch=12)
    assert max(chosen.simulation.peaks) <= raised.value.peak


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=len(BYTES), max_size=len(BYTES)), min_size=4, max_size=4))
def test_what_is_said_to_be_needed_is_enough(bytes_of: list[list[int]]) -> None:
    def given_costs(microbatches: int, virtual: int) -> list[StageCosts] | None:
        times = {"forward_seconds": 1.0, "input_backward_seconds": 1.0, "weight_backward_seconds": 1.0}
        stages = [StageCosts(**times, **dict(zip(BYTES, held, strict=True))) for held in bytes_of]  # type: ignore[arg-type]
        return {1: stages[:2], 2: stages}.get(virtual)

    with contextlib.suppress(BudgetError):  # where one byte is enough
        choose(given_costs, 2, 1, batch=4)
        return
    with pytest.raises(BudgetError) as raised:
        choose(given_costs, 2, 1, batch=4)
    assert raised.value.peak is not None
    assert max(choose(given_costs, 2, raised.value.peak, batch=4).simulation.peaks) <= raised.value.peak


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"schedules": "2F2B"}, "there is no schedule '2F2B'"),
        ({"schedules": []}, "no schedule is named"),
        (
            {"microbatches": 5},
            "12 can't be divided into 5 microbatches of equal size. Numbers that divide it: 2, 3, 4, 6",
        ),
        ({"microbatches": "many"}, "can't be divided into 'many'"),
        ({"batch": 0}, "a batch of 0 .* none"),
        ({"virtual": 0}, "0 stages per rank"),
        ({"schedules": "ZBVZeroBubble", "virtual": 1}, "no schedule for 3 ranks of such sizes: .* it needs 2 stages"),
        ({"virtual": 4, "schedules": "LoopedBFS"}, "the model has no 12 stages"),
    ],
)
def test_what_can_not_be_asked_for(asked: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"batch": 12, **asked}
    with pytest.raises(PipelineError, match=said):
        choose(costs_of, RANKS, 10**6, **given)  # type: ignore[arg-type]


numbers = st.integers(0, 6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[StageCosts], tuple[int, ...], int, tuple[int, ...]]:
    ranks, virtual, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    way = placement(ranks, virtual, draw(st.booleans()))
    stages = [
        StageCosts(**{name: draw(numbers) for name in StageCosts.__dataclass_fields__})  # type: ignore[arg-type]
        for _ in way
    ]
    rooms = tuple(room + draw(st.integers(0, 30)) for room in bytes_for_one_microbatch(stages, way, microbatches))
    return stages, way, microbatches, rooms


@settings(max_examples=40, deadline=None)
@given(problems())
def test_orders_can_be_run_within_the_memory(
    problem: tuple[list[StageCosts], tuple[int, ...], int, tuple[int, ...]],
) -> None:
    stages, way, microbatches, rooms = problem
    made = list(list_schedules(stages, way, microbatches, rooms))
    assert made
    for one in made:
        assert one.placement == way
        peaks = simulate(one, stages).peaks
        assert all(peak <= room for peak, room in zip(peaks, rooms, strict=True))


def test_none_where_not_one_microbatch_fits() -> None:
    stages = equal_stages(2, saved_bytes=10, rest_bytes=5, working_bytes=1)
    assert bytes_for_one_microbatch(stages, (0, 1), 4) == (16, 16)
    assert list(list_schedules(stages, (0, 1), 4, (16, 16)))
    assert not list(list_schedules(stages, (0, 1), 4, (15, 16)))
    assert not list(list_schedules(stages, (0, 1), 4, (3, 16)))


def test_it_hides_messages_behind_microbatches_that_the_memory_allows() -> None:
    stages = equal_stages(4, forward_send_seconds=0.6, backward_send_seconds=0.6, saved_bytes=1)
    best = min(simulate(made, stages).seconds for made in list_schedules(stages, (0, 1, 2, 3), 16, (1000,) * 4))
    assert best < simulate(schedule("1F1B", 4, 16), stages).seconds * 0.9
    assert best < simulate(schedule("InterleavedZeroBubble", 4, 16), stages).seconds * 0.99


@pytest.mark.parametrize("turns", [False, True])
def test_torch_runs_it(turns: bool, tmp_path: Path) -> None:
    way = placement(3, 2, turns)
    made = next(list_schedules(equal_stages(6, saved_bytes=1), way, 4, (6,) * 3))
    wanted = [list(map(str, order)) for order in made.orders]
    for rows, form in ((made.orders, "compute_only"), (runtime_actions(made), "compute_comms")):
        assert run_csv_schedule(rows, form, way, 3, 4, tmp_path) == wanted
