"""Replay of operations on streams, and of tasks of several ranks, against timelines counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.simulate.events import (
    COMPUTE,
    FROM_HOST_STREAM,
    TO_HOST_STREAM,
    Operation,
    Task,
    replay,
    replay_tasks,
)


def compute(seconds: float, *needs: int) -> Operation:
    return Operation("compute", "compute", seconds, needs)


def send(seconds: float, *needs: int) -> Operation:
    return Operation("send", "communication", seconds, needs)


def test_nothing_takes_no_time() -> None:
    assert replay([]).seconds == 0.0


def test_communication_hides_behind_compute_that_does_not_need_it() -> None:
    timeline = replay([compute(2), send(3, 0), compute(4, 0), compute(1, 1, 2)])
    assert timeline.starts == (0, 2, 2, 6)
    assert timeline.ends == (2, 5, 6, 7)
    assert timeline.seconds == 7
    assert timeline.exposed == 0


def test_communication_that_is_waited_for_is_exposed() -> None:
    timeline = replay([compute(2), send(3, 0), compute(1, 1)])
    assert timeline.seconds == 6
    assert timeline.exposed == 3


def test_communication_is_exposed_for_the_part_that_is_not_hidden() -> None:
    timeline = replay([compute(1), send(5, 0), compute(2, 0), compute(1, 1)])
    assert timeline.ends == (1, 6, 3, 7)
    assert timeline.exposed == 3


def test_a_stream_does_not_overtake_itself() -> None:
    timeline = replay([send(4), compute(1, 0), compute(1), send(1)])
    assert timeline.starts == (0, 4, 5, 4)


def test_streams_of_different_links_carry_at_the_same_time() -> None:
    timeline = replay([compute(1), Operation("near", "near", 4, (0,)), Operation("far", "far", 6, (0,)), compute(2, 0)])
    assert timeline.starts == (0, 1, 1, 1)
    assert timeline.seconds == 7
    assert timeline.exposed == 4
    assert timeline.hidden == 2


def test_an_operation_needs_only_earlier_ones() -> None:
    with pytest.raises(AssertionError, match="needs what is issued after it"):
        replay([compute(1, 1), compute(1)])


@st.composite
def programs(draw: st.DrawFn) -> list[Operation]:
    operations: list[Operation] = []
    for index in range(draw(st.integers(0, 12))):
        needs = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        stream = draw(st.sampled_from(["compute", "communication", "another link"]))
        operations.append(Operation(f"o{index}", stream, draw(st.integers(0, 20)), tuple(sorted(needs))))
    return operations


@given(programs())
def test_a_replay_lies_between_its_bounds(operations: list[Operation]) -> None:
    timeline = replay(operations)
    sums = {"compute": 0.0, "communication": 0.0, "another link": 0.0}
    chains: list[float] = []
    for operation in operations:
        sums[operation.stream] += operation.seconds
        chains.append(operation.seconds + max((chains[need] for need in operation.needs), default=0.0))
    assert max(*sums.values(), *chains, 0.0) <= timeline.seconds <= sum(sums.values())
    communication = sum(sums.values()) - sums["compute"]
    assert timeline.exposed + timeline.hidden <= communication
    assert timeline.exposed == timeline.seconds - sums["compute"]
    assert timeline.hidden <= sums["compute"]


@given(programs())
def test_needs_and_order_are_kept(operations: list[Operation]) -> None:
    timeline = replay(operations)
    for index, operation in enumerate(operations):
        assert all(timeline.ends[need] <= timeline.starts[index] for need in operation.needs)
        before = [i for i in range(index) if operations[i].stream == operation.stream]
        assert all(timeline.ends[i] <= timeline.starts[index] for i in before)


def test_a_device_waits_for_a_host_that_is_slower() -> None:
    small = [Operation("kernel", COMPUTE, 1.0, dispatch=3.0) for _ in range(4)]
    assert replay(small).seconds == 13.0
    large = [Operation("kernel", COMPUTE, 5.0, dispatch=3.0) for _ in range(4)]
    assert replay(large).seconds == 23.0
    assert replay(large).exposed == 0.0


def task(rank: int, seconds: float, *needs: int) -> Task:
    return Task("compute", "compute", COMPUTE, (rank,), seconds, needs)


def transfer(sender: int, receiver: int, seconds: float, *needs: int) -> Task:
    return Task("send", "send", "link", (sender, receiver), seconds, needs)


def test_no_tasks_take_no_time() -> None:
    assert replay_tasks([]).seconds == 0.0


def test_ranks_compute_side_by_side() -> None:
    times = replay_tasks([task(0, 2), task(1, 3), task(0, 4), task(1, 1)])
    assert times.starts == (0, 0, 2, 3)
    assert times.seconds == 6


def test_a_rank_waits_for_a_message_behind_which_another_computes() -> None:
    times = replay_tasks([task(0, 2), transfer(0, 1, 3, 0), task(0, 4), task(1, 1, 1)])
    assert times.starts == (0, 2, 2, 5)
    assert times.ends == (2, 5, 6, 6)


def test_both_ways_of_a_link_are_one_stream_and_another_link_is_not() -> None:
    assert replay_tasks([transfer(0, 1, 2), transfer(1, 0, 2), transfer(1, 2, 2)]).starts == (0, 2, 0)


def test_communication_slows_computation_on_both_of_its_ranks_while_it_lasts() -> None:
    tasks = [task(0, 4), task(1, 1), transfer(0, 1, 2, 1), task(1, 1), task(2, 3)]
    times = replay_tasks(tasks, contention=0.25)
    assert times.ends[2] == 3
    assert times.ends[0] == pytest.approx(4.5)  # two seconds beside the message, each of which cost a quarter
    assert times.ends[3] == pytest.approx(2 + 1 / 3 - 1 + 1)
    assert times.ends[4] == 3


@pytest.mark.parametrize("contention", [1.0, 3.0])
def test_communication_that_stops_computation_takes_its_place(contention: float) -> None:
    times = replay_tasks([task(0, 1), transfer(0, 1, 2, 0), task(0, 1, 0)], contention)
    assert times.ends == (1, 3, 4)


def test_messages_of_no_length_disturb_nothing() -> None:
    times = replay_tasks([task(0, 0.1), transfer(0, 1, 0.0, 0), task(0, 0.2, 0)], 1.0)
    assert times.ends == (0.1, 0.1, pytest.approx(0.3))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sets(st.integers(0, 11), max_size=3)), max_size=12))
def test_of_one_rank_it_says_what_the_replay_of_a_device_says(drawn: list[tuple[bool, int, set[int]]]) -> None:
    tasks, operations = [], []
    for index, (computes, seconds, wanted) in enumerate(drawn):
        needs = tuple(sorted(need for need in wanted if need < index))
        tasks.append(task(0, seconds, *needs) if computes else transfer(0, 1, seconds, *needs))
        operations.append(Operation("", tasks[-1].stream, seconds, needs))
    times, timeline = replay_tasks(tasks), replay(operations)
    assert (times.starts, times.ends, times.seconds) == (timeline.starts, timeline.ends, timeline.seconds)


def test_the_step_ends_with_its_last_task_though_one_was_expected_to_end_later() -> None:
    tasks = [task(0, 1), transfer(0, 1, 0.5, 0), task(0, 1, 0)]
    assert replay_tasks(tasks, 0.9).seconds == pytest.approx(2.45)


def test_copies_to_the_host_hide_beside_compute_and_do_not_slow_it_down() -> None:
    copy = [Operation("copy", stream, 3, (0,)) for stream in (TO_HOST_STREAM, FROM_HOST_STREAM)]
    timeline = replay([compute(1), *copy, compute(4, 0), compute(1, 1, 2)])
    assert timeline.starts == (0, 1, 1, 1, 5)
    assert (timeline.seconds, timeline.exposed, timeline.hidden) == (6, 0, 0)
    assert timeline.seconds_with_contention(1.0) == 6
    # What is not hidden is exposed, as of all communication; what hides beside it is hidden.
    timeline = replay([compute(1), copy[0], send(2, 0), compute(1, 0), compute(1, 1, 2)])
    assert (timeline.seconds, timeline.exposed, timeline.hidden) == (5, 2, 1)
