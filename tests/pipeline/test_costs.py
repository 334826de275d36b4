""""""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import SCHEDULES, ActionKind, placement, schedule
from autoshard.pipeline.schedule.costs import StageCosts, least_bytes, least_seconds, rest_bytes
from autoshard.pipeline.schedule.tasks import simulate, step_task_graph
from tests.pipeline.cases import equal_stages, sizes


@pytest.mark.parametrize("amount", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_none(amount: float) -> None:
    with pytest.raises(PipelineError, match="forward_seconds of a stage is"):
        StageCosts(forward_seconds=amount, input_backward_seconds=1, weight_backward_seconds=1)


def test_halves_of_backward_are_the_whole() -> None:
    stage = StageCosts(
        forward_seconds=1, input_backward_seconds=2, weight_backward_seconds=3, saved_bytes=10, weight_saved_bytes=4
    )
    whole, halves = ActionKind.BACKWARD, (ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD)
    assert stage.seconds(whole) == sum(map(stage.seconds, halves)) == 5
    assert (
        stage.memory_change(ActionKind.FORWARD)
        == -stage.memory_change(whole)
        == -sum(map(stage.memory_change, halves))
        == 10
    )
    assert stage.memory_change(ActionKind.INPUT_BACKWARD) == -6


def test_ranks_have_room_for_what_their_stages_receive() -> None:
    stages = [
        StageCosts(
            forward_seconds=1,
            input_backward_seconds=1,
            weight_backward_seconds=1,
            rest_bytes=1000 * (stage + 1),
            forward_bytes=10,
            backward_bytes=1,
        )
        for stage in range(4)
    ]
    assert rest_bytes((0, 1, 1, 0), 2, stages) == (1000 + 4000 + 2 + 20, 2000 + 3000 + 22 + 22)


SOME = sizes((1, 2, 3), (1, 2, 3), (3, 4, 6))


@st.composite
def problems(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], list[StageCosts]]:
    size = draw(st.sampled_from(SOME))
    _, ranks, _, virtual = size
    stages = []
    for _ in range(ranks * virtual):
        amounts = {
            name: draw(st.integers(0, 9)) * (0.5 if name.endswith("_seconds") else 1)
            for name in StageCosts.__dataclass_fields__
        }
        amounts["weight_saved_bytes"] = min(amounts["weight_saved_bytes"], amounts["saved_bytes"])
        stages.append(StageCosts(**amounts))  # type: ignore[arg-type]
    return size, stages


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_schedule_is_below_its_bounds(problem: tuple[tuple[str, int, int, int], list[StageCosts]]) -> None:
    (name, ranks, microbatches, virtual), stages = problem
    family = SCHEDULES[name]
    way = placement(ranks, virtual, family.turns)
    result = simulate(step_task_graph(schedule(name, ranks, microbatches, virtual), stages))
    assert least_seconds(stages, way, microbatches, family.halves) <= result.seconds * (1 + 1e-12)
    assert all(least <= peak for least, peak in zip(least_bytes(stages, way, microbatches), result.peaks, strict=True))


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (3, 2), (4, 8)])
def test_of_equal_stages_it_is_the_step(ranks: int, microbatches: int) -> None:
    bound = least_seconds(equal_stages(ranks), placement(ranks, 1), microbatches, halves=False)
    assert bound == pytest.approx((microbatches + ranks - 1) * 3)


def test_what_families_say_of_their_schedules() -> None:
    for name, ranks, microbatches, virtual in SOME:
        made, family = schedule(name, ranks, microbatches, virtual), SCHEDULES[name]
        assert made.placement == placement(ranks, virtual, family.turns)
        assert made.splits_backward <= family.halves
