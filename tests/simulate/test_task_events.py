from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.simulate.events import COMPUTE, Operation, replay
from autoshard.simulate.task_events import Task, replay_tasks


def compute(rank: int, seconds: float, *needs: int) -> Task:
    return Task("compute", "compute", COMPUTE, (rank,), seconds, needs)


def send(sender: int, receiver: int, seconds: float, *needs: int) -> Task:
    return Task("send", "send", "link", (sender, receiver), seconds, needs)


def test_nothing_takes_no_time() -> None:
    assert replay_tasks([]).seconds == 0.0


def test_ranks_compute_side_by_side() -> None:
    times = replay_tasks([compute(0, 2), compute(1, 3), compute(0, 4), compute(1, 1)])
    assert times.starts == (0, 0, 2, 3)
    assert times.seconds == 6


def test_a_rank_waits_for_a_message_behind_which_another_computes() -> None:
    times = replay_tasks([compute(0, 2), send(0, 1, 3, 0), compute(0, 4), compute(1, 1, 1)])
    assert times.starts == (0, 2, 2, 5)
    assert times.ends == (2, 5, 6, 6)


def test_both_ways_of_a_link_are_one_stream_and_another_link_is_not() -> None:
    assert replay_tasks([send(0, 1, 2), send(1, 0, 2), send(1, 2, 2)]).starts == (0, 2, 0)


def test_communication_slows_computation_on_both_of_its_ranks_while_it_lasts() -> None:
    tasks = [compute(0, 4), compute(1, 1), send(0, 1, 2, 1), compute(1, 1), compute(2, 3)]
    times = replay_tasks(tasks, contention=0.25)
    assert times.ends[2] == 3
    assert times.ends[0] == pytest.approx(4.5)  # two seconds beside the message, each of which cost a quarter
    assert times.ends[3] == pytest.approx(2 + 1 / 3 - 1 + 1)
    assert times.ends[4] == 3


@pytest.mark.parametrize("contention", [1.0, 3.0])
def test_communication_that_stops_computation_takes_its_place(contention: float) -> None:
    times = replay_tasks([compute(0, 1), send(0, 1, 2, 0), compute(0, 1, 0)], contention)
    assert times.ends == (1, 3, 4)


def test_messages_of_no_length_disturb_nothing() -> None:
    times = replay_tasks([compute(0, 0.1), send(0, 1, 0.0, 0), compute(0, 0.2, 0)], 1.0)
    assert times.ends == (0.1, 0.1, pytest.approx(0.3))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sets(st.integers(0, 11), max_size=3)), max_size=12))
def test_of_one_rank_it_says_what_the_replay_of_a_device_says(drawn: list[tuple[bool, int, set[int]]]) -> None:
    tasks, operations = [], []
    for index, (computes, seconds, wanted) in enumerate(drawn):
        needs = tuple(sorted(need for need in wanted if need < index))
        tasks.append(compute(0, seconds, *needs) if computes else send(0, 1, seconds, *needs))
        operations.append(Operation("", tasks[-1].stream, seconds, needs))
    times, timeline = replay_tasks(tasks), replay(operations)
    assert (times.starts, times.ends, times.seconds) == (timeline.starts, timeline.ends, timeline.seconds)


def test_the_step_ends_with_its_last_task_though_one_was_expected_to_end_later() -> None:
    tasks = [compute(0, 1), send(0, 1, 0.5, 0), compute(0, 1, 0)]
    assert replay_tasks(tasks, 0.9).seconds == pytest.approx(2.45)
