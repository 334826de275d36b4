"""Pipelines of models from the meta device: every rank draws one device's numbers for its stages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import autoshard
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.actions import schedule
from tests.memory_tracker import Tracker
from tests.pipeline.pipelines import (
    assert_equal,
    held_by,
    model,
    pipeline_of,
    plan_by_hand,
    train_alone,
    train_pipeline,
)
from tests.workers import Workers

SEED = 7


def drawn(name: str) -> torch.nn.Module:
    """The model as one device draws it."""
    module, _ = model(name, layers=1)
    for part in module.modules():
        part._is_hf_initialized = False
    torch.manual_seed(SEED)
    module.init_weights()
    return module


def on_meta(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The model without numbers, and a batch."""
    inputs = model(name, layers=1)[1]
    with torch.device("meta"):
        return model(name, layers=1)[0], inputs


def materialized(name: str, plan: PipelinePlan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the rank holds before training and after."""
    module, inputs = on_meta(name)
    pipeline = pipeline_of(module, inputs, plan)
    torch.manual_seed(SEED + torch.distributed.get_rank())  # the first rank's counts
    assert autoshard.materialize(pipeline) is pipeline
    autoshard.materialize(pipeline)  # nothing is left to do
    before = {name: value.clone() for name, value in held_by(pipeline).items()}
    assert all(parameter.is_meta for parameter in module.parameters())
    return before, train_pipeline(pipeline, inputs)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("hf_gpt2", {"pp": 2, "tp": 2}),  # with a parameter that two stages hold
        ("hf_llama", {"pp": 2}),  # with buffers that no stage holds
    ],
)
def test_every_rank_draws_one_devices_numbers(two: Workers, four: Workers, name: str, mesh: Mapping[str, int]) -> None:
    plan = plan_by_hand(*model(name, layers=1), mesh, schedule("1F1B", 2, 2))
    alone = drawn(name)
    state = {key: value.clone() for key, value in alone.state_dict().items()}
    ranks = (four if "tp" in mesh else two).run(materialized, name, plan)
    for before, _ in ranks:
        for key, value in before.items():
            assert torch.equal(value, state[key]), key
    assert set().union(*(before for before, _ in ranks)) == state.keys()
    assert_equal([after for _, after in ranks], train_alone(alone, model(name, layers=1)[1], 1))


class Deep(nn.Module):
    """So many layers that a parameter is little of a stage, and so wide that the random state is little of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def deep() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Deep(), {"x": torch.empty(4, 128)}


def most_held(plan: PipelinePlan) -> tuple[int, int, int, int]:
    """The most bytes held at once; those of the rank's shards, of the largest parameter, and of the stage, whole."""
    pipeline = pipeline_of(*deep(), plan)
    with Tracker() as tracker:
        autoshard.materialize(pipeline)
    parameters = list(pipeline.parameters())
    kept = sum(one.to_local().nbytes for one in parameters)
    return tracker.peak.bytes, kept, max(one.nbytes for one in parameters), sum(one.nbytes for one in parameters)


def test_no_rank_holds_its_stage_whole(four: Workers) -> None:
    """Beside its shards there is one whole parameter at a time, and the part that is cut from it."""
    plan = plan_by_hand(*deep(), {"pp": 2, "tp": 2}, schedule("1F1B", 2, 2), hints={"*": Shard(0)})
    for peak, kept, largest, stage in four.run(most_held, plan):
        assert kept == stage / 2
        assert kept + largest < peak <= kept + 2 * largest < stage
