from __future__ import annotations

import pytest

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import ActionKind
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes


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
