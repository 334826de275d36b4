"""Costs of stages: bounds of a step, its tasks, and its simulation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import SCHEDULES, ActionKind, placement, schedule
from autoshard.pipeline.schedule.costs import (
    Simulation,
    StageCosts,
    least_bytes,
    least_seconds,
    rest_bytes,
    simulate,
    step_tasks,
)
from autoshard.simulate.events import COMPUTE, Task
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
    assert rest_bytes(stages, (0, 1, 1, 0), 2) == (1000 + 4000 + 2 + 20, 2000 + 3000 + 22 + 22)


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
    result = simulate(schedule(name, ranks, microbatches, virtual), stages)
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


def edges(tasks: Sequence[Task]) -> dict[str, set[str]]:
    return {task.name: {tasks[need].name for need in task.needs} for task in tasks}


def test_the_graph_of_two_ranks() -> None:
    tasks = step_tasks(schedule("GPipe", 2, 1), equal_stages(2))
    assert edges(tasks) == {
        "0F0": set(),
        "0SEND_F0": {"0F0"},
        "1F0": {"0SEND_F0"},
        "1B0": {"1F0"},
        "1SEND_B0": {"1B0", "0F0"},
        "reduce 1": {"1B0"},
        "0B0": {"0F0", "1SEND_B0"},
        "reduce 0": {"0B0"},
        "apply 0": {"0B0", "reduce 0"},
        "apply 1": {"1B0", "reduce 1"},
    }
    assert {task.ranks for task in tasks if "SEND" in task.name} == {(0, 1), (1, 0)}


def test_stages_on_one_rank_hand_on_without_a_message() -> None:
    graph = edges(step_tasks(schedule("ZBVZeroBubble", 1, 1, 2), equal_stages(2)))
    assert graph["1F0"] == {"0F0"}
    assert graph["1I0"] == {"1F0"}
    assert graph["1W0"] == {"1I0"}
    assert graph["0I0"] == {"0F0", "1I0"}
    assert not any("SEND" in name for name in graph)


def test_two_that_run_together_wait_for_all_that_both_need_and_send_after_both() -> None:
    made = schedule("DualPipeV", 2, 4, 2)
    graph = edges(step_tasks(made, equal_stages(4)))
    (pair,) = [action for action in made.orders[1] if str(action) == "(1F3;2B1)OVERLAP_F_B"]
    first, second = map(str, pair.parts)
    assert graph[first] == graph[second] == {"0SEND_F3", "2F1", "3SEND_B1"}
    (after,) = [action for action in made.orders[1] if str(action) == "(2F2;1B0)OVERLAP_F_B"]
    assert str(after.parts[1]) in graph["2SEND_F2"] & graph["1SEND_B0"]


def test_a_half_of_backward_for_weights_does_not_wait_for_what_is_sent() -> None:
    graph = edges(step_tasks(schedule("InterleavedZeroBubble", 2, 2), equal_stages(2)))
    assert graph["1W0"] == {"1I0"}


def test_as_many_costs_as_stages() -> None:
    with pytest.raises(PipelineError, match="has 2 stages, and there are costs of 1"):
        step_tasks(schedule("GPipe", 2, 2), equal_stages(1))


SIMULATED = sizes((1, 2, 3), (1, 2), (4, 6))


def run(name: str, ranks: int, microbatches: int, virtual: int = 1, **more: float) -> Simulation:
    made = schedule(name, ranks, microbatches, virtual)
    return simulate(made, equal_stages(made.stages, virtual, **more))


def costs(**amounts: float) -> StageCosts:
    return StageCosts(
        **{"forward_seconds": 1.0, "input_backward_seconds": 1.0, "weight_backward_seconds": 1.0, **amounts}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9)])
def test_equal_stages_take_what_the_formula_says(name: str, ranks: int, microbatches: int) -> None:
    result = run(name, ranks, microbatches)
    assert result.seconds == pytest.approx((microbatches + ranks - 1) * 3)
    assert result.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert result.idle == pytest.approx([result.bubble] * ranks)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize(("ranks", "microbatches", "virtual"), [(2, 4, 2), (2, 4, 3), (4, 8, 2)])
def test_stages_that_go_round_divide_the_bubble(name: str, ranks: int, microbatches: int, virtual: int) -> None:
    bubble = run(name, ranks, microbatches, virtual).bubble
    assert bubble == pytest.approx((ranks - 1) / (virtual * microbatches + ranks - 1))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_halves_of_backward_fill_the_bubble(ranks: int, microbatches: int) -> None:
    whole = run("1F1B", ranks, microbatches).seconds
    # ZB1P: only its forwards and the halves for inputs stand between the first rank and the last (Qi et al., 2.2)
    assert run("InterleavedZeroBubble", ranks, microbatches).seconds == pytest.approx(whole - 2 * (ranks - 1))
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert run(name, ranks, microbatches, 2).bubble < run("Interleaved1F1B", ranks, microbatches, 2).bubble


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (3, 3), (3, 7)])
def test_microbatches_in_flight(ranks: int, microbatches: int) -> None:
    assert run("GPipe", ranks, microbatches, saved_bytes=1).peaks == (microbatches,) * ranks
    assert run("1F1B", ranks, microbatches, saved_bytes=1).peaks == tuple(
        min(ranks - rank, microbatches) for rank in range(ranks)
    )


def test_what_is_held_when() -> None:
    made = schedule("InterleavedZeroBubble", 1, 1)
    stage = costs(rest_bytes=100, saved_bytes=10, weight_saved_bytes=4, working_bytes=1)
    assert simulate(made, [stage]).memory == (
        ((0.0, 100), (0.0, 111), (1.0, 110), (1.0, 111), (2.0, 104), (2.0, 105), (3.0, 100)),
    )


def test_what_is_received_has_room_for_every_microbatch() -> None:
    stage = costs(forward_bytes=10, backward_bytes=1, rest_bytes=1000)
    assert simulate(schedule("1F1B", 3, 4), [stage] * 3).peaks == (1004, 1044, 1040)


def test_gradients_are_reduced_behind_what_is_left_and_then_applied() -> None:
    stages = [costs(reduction_seconds=2.0, application_seconds=0.5), costs(reduction_seconds=1.0)]
    result = simulate(schedule("GPipe", 2, 1), stages)
    ran = {task.name: (start, end) for task, start, end in zip(result.tasks, result.starts, result.ends, strict=True)}
    assert ran["reduce 1"] == (4.0, 5.0)
    assert ran["0B0"] == (4.0, 6.0)
    assert ran["reduce 0"] == (6.0, 8.0)
    assert ran["apply 0"] == (8.0, 8.5)
    assert ran["apply 1"] == (5.0, 5.0)
    assert result.seconds == 8.5
    assert result.idle == pytest.approx([1 - 3.5 / 8.5, 1 - 3 / 8.5])


def test_messages_take_their_time_and_are_asked_for_in_order() -> None:
    result = simulate(schedule("GPipe", 2, 2), [costs(forward_send_seconds=3.0, backward_send_seconds=0.5)] * 2)
    ran = {task.name: (start, end) for task, start, end in zip(result.tasks, result.starts, result.ends, strict=True)}
    assert ran["0SEND_F0"] == (1.0, 4.0)
    assert ran["0SEND_F1"] == (5.0, 8.0)  # its receiver asks for it behind 1F0
    assert ran["1F1"] == (8.0, 9.0)
    assert ran["1SEND_B0"] == (11.0, 11.5)
    assert result.seconds == 16.0


def test_what_is_sent_slows_what_is_computed_beside_it() -> None:
    result = simulate(schedule("GPipe", 2, 2), [costs(forward_send_seconds=1.0)] * 2, contention=0.5)
    ran = dict(zip([task.name for task in result.tasks], result.ends, strict=True))
    assert ran["0F0"] == 1.0
    assert ran["0F1"] == 2.5  # half a second of work in the second of the first message, and the rest after it


amounts = st.floats(0.0, 8.0).map(lambda amount: round(amount, 2))


@st.composite
def simulated_steps(draw: st.DrawFn) -> tuple[tuple[str, int, int, int], list[StageCosts]]:
    name, ranks, microbatches, virtual = draw(st.sampled_from(SIMULATED))
    names = [name for name in StageCosts.__dataclass_fields__ if name.endswith("_seconds")]
    stages = [StageCosts(**{name: draw(amounts) for name in names}) for _ in range(ranks * virtual)]  # type: ignore[arg-type]
    return (name, ranks, microbatches, virtual), stages


@settings(max_examples=30, deadline=None)
@given(simulated_steps(), st.floats(0.0, 1.0))
def test_a_step_is_never_below_its_bounds(
    problem: tuple[tuple[str, int, int, int], list[StageCosts]], contention: float
) -> None:
    size, stages = problem
    result = simulate(schedule(*size), stages, contention)
    work = [0.0] * size[1]
    ends: list[float] = []
    for task in result.tasks:
        ends.append(task.seconds + max((ends[need] for need in task.needs), default=0.0))
        work[task.ranks[0]] += task.seconds if task.stream == COMPUTE else 0.0
    assert result.seconds >= max(*work, *ends) * (1 - 1e-12)
    assert result.seconds <= sum(task.seconds for task in result.tasks) * (1 + contention) + 1e-9
    assert all(-1e-9 <= share <= 1 for share in result.idle)
    assert all(moments[-1][1] == moments[0][1] for moments in result.memory)


@settings(max_examples=30, deadline=None)
@given(simulated_steps(), st.floats(0.0, 1.0))
def test_more_bandwidth_slows_no_order(
    problem: tuple[tuple[str, int, int, int], list[StageCosts]], part: float
) -> None:
    """Without contention; with it a message that comes earlier may slow down another computation."""
    size, stages = problem
    fields = list(StageCosts.__dataclass_fields__)
    quicker = [
        StageCosts(**{name: getattr(stage, name) * (part if "send" in name else 1) for name in fields})
        for stage in stages
    ]
    before, after = (simulate(schedule(*size), one).seconds for one in (stages, quicker))
    assert after <= before * (1 + 1e-12)
