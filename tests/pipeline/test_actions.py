from __future__ import annotations

from pathlib import Path

import pytest

from autoshard import options
from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import SCHEDULES, Action, ActionKind, Schedule, runtime_actions, schedule
from tests.pipeline._torch import run_csv_schedule, run_schedule, with_messages
from tests.pipeline.cases import parse_orders, sizes


@pytest.mark.parametrize("text", ["2F0", "11SEND_B3", "0REDUCE_GRAD", "(0F5;7B0)OVERLAP_F_B"])
def test_actions_are_written_as_they_are_read(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_an_action_that_is_none() -> None:
    with pytest.raises(PipelineError, match="'2X0' is no action"):
        Action.parse("2X0")


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        (("0F0 1F0 1B0 0B0", "0F1"), "stage 0 on rank 0 too"),
        (("0F0 0B0", "2F0 2B0"), "stages count from 0, without gaps"),
        (("0F0 0B0 1F0 1B0", "2F0 2B0"), "equally many on each"),
        (("0F0 0B0", ""), "equally many on each"),
        (("0F0 0B0", "1F0"), "microbatch 0 on stage 1 1 times forward, 0 times backward"),
        (("0F0 0F0 0B0",), "2 times forward"),
        (("0F0 0I0",), "needs one forward, and one backward or one of each half"),
        (("0F0 0B0 0F1",), "microbatches from 1 on"),
        (("0F0 0B0 0REDUCE_GRAD",), "that are no computations"),
    ],
)
def test_orders_that_are_no_schedule(orders: tuple[str, ...], said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        Schedule("mine", 1, parse_orders(*orders))


SOME = sizes((2, 3), (1, 2), (6,))


def computations(made: Schedule) -> list[list[str]]:
    return [[str(part) for action in order for part in action.computations] for order in made.orders]


def test_all_schedules_are_met() -> None:
    assert {name for name, *_ in SOME} == set(SCHEDULES)
    assert ("auto", *SCHEDULES, "custom") == options.SCHEDULES


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


ALL = sizes((1, 2, 3, 4), (1, 2, 3), (1, 2, 4, 6, 8, 9))


def texts(orders: tuple[tuple[Action, ...], ...]) -> list[list[str]]:
    return [[str(action) for action in order] for order in orders]


def test_messages_stand_where_torch_puts_them() -> None:
    for name, ranks, microbatches, virtual in ALL:
        made = schedule(name, ranks, microbatches, virtual)
        assert texts(runtime_actions(made)) == with_messages(texts(made.orders), made.placement, microbatches)


def test_two_ranks_have_their_messages_in_the_same_order() -> None:
    """A send and its receive are one message; a rank waits for no message that another has behind one of its own."""
    for name, ranks, microbatches, virtual in ALL:
        made = schedule(name, ranks, microbatches, virtual)
        between: dict[tuple[int, int], list[tuple[int, ActionKind, int | None]]] = {}
        for rank, order in enumerate(runtime_actions(made)):
            for stage, kind, microbatch, _ in order:
                forward = kind in (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)
                if forward or kind in (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD):
                    received = kind in (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
                    source = stage if not received else stage - 1 if forward else stage + 1
                    target = source + 1 if forward else source - 1
                    other = made.placement[source if received else target]
                    sent = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
                    between.setdefault((rank, other), []).append((source, sent, microbatch))
        assert all(between[other, rank] == messages for (rank, other), messages in between.items())


def test_orders_that_wait_for_one_another_are_named() -> None:
    made = Schedule("mine", 2, parse_orders("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"))
    assert runtime_actions(made)  # another order of the messages back is fine: they are told apart
    stuck = Schedule("mine", 2, parse_orders("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(
        PipelineError, match=r"rank 0 is to run 0B0, which needs 1B0; rank 1 is to run 1F1, which needs 0F1"
    ):
        runtime_actions(stuck)


def test_a_backward_before_its_forward_waits_for_itself() -> None:
    with pytest.raises(PipelineError, match="rank 0 is to run 0B0, which needs 0F0; rank 0 has that behind 0B0"):
        runtime_actions(Schedule("mine", 1, parse_orders("0B0 0F0")))


def test_what_neighbours_on_one_rank_hand_on_is_no_message() -> None:
    sent = [action.kind for order in runtime_actions(schedule("ZBVZeroBubble", 1, 2, 2)) for action in order]
    assert ActionKind.SEND_FORWARD not in sent
    assert ActionKind.RECEIVE_BACKWARD not in sent
