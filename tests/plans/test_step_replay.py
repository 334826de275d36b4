from __future__ import annotations

import json

from autoshard.plans import plan_data
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.plans.step_replay import CollectiveSpan, ComputeSpan, HeldBytes, StepReplay
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan


def test_a_replay_comes_back_from_the_file_of_its_plan() -> None:
    plan = planned_gpt()
    assert plan.step_replay.compute
    assert ShardingPlan.from_json(plan.to_json()).step_replay == plan.step_replay


def test_a_replay_adds_less_than_a_third_to_a_file() -> None:
    data = plan_data.to_data(planned_gpt())
    whole = len(plan_data.encode(data))
    del data["step_replay"]
    assert whole <= 4 / 3 * len(plan_data.encode(data))


def test_a_file_of_an_older_version_has_no_replay() -> None:
    data = plan_data.to_data(sample_plan())
    del data["step_replay"]
    text = plan_data.encode(data)
    assert "step_replay" not in json.loads(text)["plan"]
    assert ShardingPlan.from_json(text) == sample_plan()


def test_bytes_between_changes_stay() -> None:
    replay = StepReplay(held={"saved": (HeldBytes(1, 5), HeldBytes(3, 0)), "parameter": (HeldBytes(0, 7),)})
    assert replay.bytes_by_kind(5) == {"saved": [0, 5, 5, 0, 0], "parameter": [7] * 5}


def test_communication_is_exposed_by_axis_where_nothing_computes() -> None:
    replay = StepReplay(
        compute=(ComputeSpan(0, 0.0, 2.0), ComputeSpan(1, 5.0, 6.0)),
        collectives=(
            CollectiveSpan(0, 1.0, 4.0, "all_gather", "dp", 8),
            CollectiveSpan(0, 3.0, 5.5, "all_reduce", "tp", 8),
        ),
    )
    # One second of dp alone, one of both, and one of tp alone.
    assert replay.exposed_by_axis() == {"dp": 1.5, "tp": 1.5}
    assert StepReplay().exposed_by_axis() == {}
