"""What one rank sends of what goes from stage to stage, and plans that do not agree on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.errors import PlanError
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.stage_modules import StageModule, cut
from autoshard.pipeline.plan.boundaries import Boundaries, input_names
from autoshard.pipeline.plan.pipeline_devices import stage_target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.pipeline.chain import balance_stages
from tests.pipeline.pipelines import model
from tests.targets import target

MESH = MeshShape.of({"dp": 2})
WHOLE = (Replicate(),)


def stages(batch: int = 4) -> list[StageModule]:
    module, inputs = model("mlp")
    graph = export_forward(module, (), {name: tensor[:batch] for name, tensor in inputs.items()})
    return cut(graph, balance_stages(graph, 2), 2)


def plans(given: Placement, taken: Placement | None, parts: list[StageModule]) -> list[ShardingPlan]:
    """Of two stages: how the first leaves what it hands on, and how the second takes it, None where that is whole."""
    second: dict[str, Any] = {"mesh": MESH, "placements": {}}
    if taken is not None:
        second["input_placements"] = {parts[1].received[0].name: (taken,), "target": WHOLE, "other": WHOLE}
        second["options"] = {"inputs": "local"}
    return [ShardingPlan(mesh=MESH, placements={}, output_placements={"output[0]": (given,)}), ShardingPlan(**second)]


@pytest.mark.parametrize(("placement", "rows"), [(Shard(0), 2), (Replicate(), 4)])
def test_what_crosses(placement: Placement, rows: int) -> None:
    parts = stages()
    boundaries = Boundaries(plans(placement, None if placement.is_replicate() else placement, parts), MESH)
    whole = parts[0].returned[0]
    assert boundaries.messages(parts[0])[0] == ()
    (sent,), (received,) = boundaries.messages(parts[0])[1], boundaries.messages(parts[1])[0]
    for tensor in (sent, received):
        assert tensor.shape == (rows, *whole.shape[1:])
        assert (tensor.dtype, tensor.requires_grad) == (whole.dtype, True)
    assert [tensor.shape for tensor in boundaries.messages(parts[1])[1]] == [torch.Size([])]


def test_options_of_a_stage() -> None:
    parts = stages()
    said = dataclasses.replace(target(), hints={"of.another.stage": Shard(0)})
    first, second = (
        stage_target(said, said.cluster, plan, input_names(part))
        for part, plan in zip(parts, plans(Shard(0), Shard(0), parts), strict=True)
    )
    assert first.hints is second.hints is None
    assert (first.inputs, first.output_placements) == ("global", {"output[0]": (Shard(0),)})
    assert (second.inputs, second.output_placements) == ("local", None)
    assert set(second.input_placements) == {parts[1].received[0].name, "target"}


def test_stages_that_disagree() -> None:
    parts = stages()
    boundaries = Boundaries(plans(Shard(0), Shard(1), parts), MESH)
    with pytest.raises(PlanError, match=r"stage 0 leaves \w+ as S\(0\), and stage 1 takes it as S\(1\)"):
        boundaries.messages(parts[1])


def test_shards_of_different_sizes() -> None:
    parts = stages(batch=3)
    boundaries = Boundaries(plans(Shard(0), Shard(0), parts), MESH)
    with pytest.raises(PlanError, match=r"does not part .* evenly: messages have one size"):
        boundaries.messages(parts[0])
