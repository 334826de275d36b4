from __future__ import annotations

import pytest

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule
from autoshard.pipeline.schedule.schedule_messages import runtime_actions
from autoshard.pipeline.schedule.schedules import schedule
from tests.pipeline._torch import with_messages
from tests.pipeline.cases import parse_orders, sizes

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
