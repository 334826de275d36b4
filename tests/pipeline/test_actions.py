from __future__ import annotations

import pytest

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, Schedule
from tests.pipeline.cases import parse_orders


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
