"""Tied parameters in several stages: one object on one rank, and plans that agree on where they lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from autoshard.errors import PlanError
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import StageModule, cut
from autoshard.pipeline.run.tied_parameters import TiedParameters, check_same_placements, tie
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.pipelines import model
from tests.workers import Workers


def stages() -> list[StageModule]:
    module, inputs = model("gpt", layers=1, tied=True)
    graph = export_forward(module, (), inputs)
    return cut(graph, balance_stages(graph, 3), 3)


def test_stages_of_one_rank_hold_one_object() -> None:
    first, _, last = stages()
    # As parallelising each alone leaves them.
    own = type(last.module.tokens.weight)(last.module.tokens.weight.detach().clone())
    last.module.tokens.weight = last.module.head.weight = own
    tie([first, last])
    for name in ("tokens.weight", "head.weight"):
        assert last.module.get_parameter(name) is first.module.get_parameter("tokens.weight")


def test_plans_have_to_agree() -> None:
    parts = stages()
    mesh = MeshShape.of({"tp": 2})
    plans = [
        ShardingPlan(mesh=mesh, placements={"tokens.weight": (placement,)})
        for placement in (Shard(0), Replicate(), Shard(0))
    ]
    check_same_placements(parts, plans)
    with pytest.raises(PlanError, match=r"parameter tokens\.weight is held by stages 0, 2"):
        check_same_placements(parts, [plans[1], *plans[1:]])


def test_pipelines_one_after_the_other_make_groups_that_meet(four: Workers) -> None:
    """The first is shared by some ranks, which have one group more than the others if those make none."""
    assert four.run(started_equal, (0, 3)) == [0, 1, 2, 0]
    assert four.run(started_equal, (1, 2, 3)) == [0, 1, 1, 1]


def started_equal(holders: tuple[int, ...]) -> float:
    """What the rank has of a parameter that starts as its rank, once the holders start equal."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([float(dist.get_rank())]))
    stages = [SimpleNamespace(shared={"weight": holders} if stage in holders else {}) for stage in range(4)]
    group = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",)).get_group()
    TiedParameters(module, stages, range(4), group).broadcast_values()  # type: ignore[arg-type]
    return module.weight.item()
