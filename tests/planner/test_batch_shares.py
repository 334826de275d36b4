"""Shares of the batch chosen for devices of different kinds, and the plans that they make faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import autoshard
from autoshard.cluster.cluster import Cluster
from tests.option_groups import grouped

MIXED = Cluster.parse("8xV100-32GB + 8xP100-16GB")
ROWS = 2**17


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


class Pinned(Tower):
    """A few columns of the input are split by columns, for which rows in shares are gathered."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        columns = autoshard.shard(x[:, :16] * 2, Shard(1))
        return super().forward(x + columns.sum(1, keepdim=True), target)


def planned(
    rows: int = ROWS, mesh: dict[str, int] | None = None, made: type[nn.Module] = Tower, **options: Any
) -> autoshard.ShardingPlan:
    with torch.device("meta"):
        module, batch = made(1024), {"x": torch.empty(rows, 1024), "target": torch.empty(rows, 1024)}
    said = {"cluster": MIXED, "dynamic": {name: {0: "batch"} for name in batch}, "effort": "fast", **options}
    plan = autoshard.plan(module, mesh or {"dp": 16}, (), batch, **grouped(said))
    assert isinstance(plan, autoshard.ShardingPlan)
    return plan


@pytest.fixture(scope="module")
def uneven() -> autoshard.ShardingPlan:
    return planned()


def test_faster_devices_take_more_and_the_step_is_shorter(uneven: autoshard.ShardingPlan) -> None:
    shares = uneven.shares["dp"]
    assert sum(shares) == ROWS
    assert 900 / 732 < shares[0] / shares[8] < 15.7 / 10.6  # between bytes and operations per second of the two
    assert len(set(shares[:8])) <= 2
    equal = planned(shares=None)
    assert equal.shares == {}
    assert uneven.step_seconds < equal.step_seconds
    assert f"{shares[0]} of {ROWS} rows on" in str(uneven)
    assert "rows" not in str(equal)
    assert autoshard.ShardingPlan.from_json(uneven.to_json()).shares == uneven.shares


def test_shares_on_one_axis_of_several() -> None:
    plan = planned(mesh={"dp": 2, "tp": 2}, cluster="2xV100-32GB + 2xP100-16GB")
    assert set(plan.shares) == {"dp"}
    assert plan.shares["dp"][0] > plan.shares["dp"][1]


def test_shares_move_to_where_there_is_memory(uneven: autoshard.ShardingPlan) -> None:
    """With as much memory as equal shares need, and little more, the faster devices have no room for theirs."""
    tight = planned(memory_limit=uneven.memory.peak * 11 // 10)
    assert sum(tight.shares["dp"]) == ROWS
    assert 1 < tight.shares["dp"][0] / tight.shares["dp"][8] < 1.3
    assert tight.step_seconds > uneven.step_seconds
    assert tight.fits


def test_what_is_pinned_otherwise_is_gathered_from_shares() -> None:
    assert planned(made=Pinned).shares["dp"][0] > planned(made=Pinned).shares["dp"][8]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (8, {}),
        (ROWS, {"inputs": "local"}),
        (ROWS, {"output_placements": "planned"}),
        (ROWS, {"dynamic": {"x": {0: "a"}, "target": {0: "a"}}, "cluster": "16xV100"}),
    ],
    ids=[
        "a batch smaller than the devices",
        "local inputs",
        "outputs as they lie",
        "one kind",
    ],
)
def test_shares_are_equal_where_others_can_not_be(rows: int, options: dict[str, Any]) -> None:
    assert planned(rows, **options).shares == {}
