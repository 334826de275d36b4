from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.schedule.actions import placement, runtime_actions, schedule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.list_schedule import bytes_for_one_microbatch, list_schedules
from autoshard.pipeline.schedule.tasks import simulate, step_task_graph
from tests.pipeline._torch import run_csv_schedule
from tests.pipeline.cases import equal_stages

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
        peaks = simulate(step_task_graph(one, stages)).peaks
        assert all(peak <= room for peak, room in zip(peaks, rooms, strict=True))


def test_none_where_not_one_microbatch_fits() -> None:
    stages = equal_stages(2, saved_bytes=10, rest_bytes=5, working_bytes=1)
    assert bytes_for_one_microbatch(stages, (0, 1), 4) == (16, 16)
    assert list(list_schedules(stages, (0, 1), 4, (16, 16)))
    assert not list(list_schedules(stages, (0, 1), 4, (15, 16)))
    assert not list(list_schedules(stages, (0, 1), 4, (3, 16)))


def test_it_hides_messages_behind_microbatches_that_the_memory_allows() -> None:
    stages = equal_stages(4, forward_send_seconds=0.6, backward_send_seconds=0.6, saved_bytes=1)
    best = min(
        simulate(step_task_graph(made, stages)).seconds
        for made in list_schedules(stages, (0, 1, 2, 3), 16, (1000,) * 4)
    )
    assert best < simulate(step_task_graph(schedule("1F1B", 4, 16), stages)).seconds * 0.9
    assert best < simulate(step_task_graph(schedule("InterleavedZeroBubble", 4, 16), stages)).seconds * 0.99


@pytest.mark.parametrize("turns", [False, True])
def test_torch_runs_it(turns: bool, tmp_path: Path) -> None:
    way = placement(3, 2, turns)
    made = next(list_schedules(equal_stages(6, saved_bytes=1), way, 4, (6,) * 3))
    wanted = [list(map(str, order)) for order in made.orders]
    for rows, form in ((made.orders, "compute_only"), (runtime_actions(made), "compute_comms")):
        assert run_csv_schedule(rows, form, way, 3, 4, tmp_path) == wanted
