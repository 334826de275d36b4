from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_bounds import least_bytes, least_seconds
from autoshard.pipeline.schedule.schedules import SCHEDULES, placement, schedule
from autoshard.pipeline.schedule.simulation import simulate
from autoshard.pipeline.schedule.tasks import step_task_graph
from tests.pipeline.cases import equal_stages, sizes

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
