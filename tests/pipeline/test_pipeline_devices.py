"""Where stages lie: clusters as their ranks see them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.patterns.graph_rules import GraphRules
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.plan.pipeline_devices import stage_clusters
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.search.shapes import Shape
from autoshard.search.step_bounds import LeastWork
from autoshard.specs.axes import MeshShape
from tests.option_groups import grouped
from tests.pipeline.small_pipelines import Regions

MESH = MeshShape.of({"pp": 2, "x": 2})


class Deep(nn.Module):
    """Ten equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(10)])

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


def test_every_rank_of_a_pipeline_sees_its_own_devices() -> None:
    mixed = Cluster.parse("2xV100 + 2xP100")
    assert [one.name for one in stage_clusters(mixed, PipelineMesh.of(MESH, "pp"))] == ["2xV100", "2xP100"]
    across = stage_clusters(mixed, PipelineMesh.of(MeshShape.of({"x": 2, "pp": 2}), "pp"))
    assert [one.name for one in across] == ["1xV100 + 1xP100"] * 2
    assert across[0].device == mixed.device
    hosts = Cluster.parse("16xV100")
    apart = stage_clusters(hosts, PipelineMesh.of(MeshShape.of({"dp": 8, "pp": 2}), "pp"))
    assert [apart[1].host_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    unequal = stage_clusters(Cluster.parse("8xV100"), PipelineMesh.of(MeshShape.of({"pp": 4}), "pp", (1, 3)))
    assert [one.count for one in unequal] == [1, 3]


def test_stages_are_planned_for_the_devices_that_they_run_on() -> None:
    batch = torch.randn(8, 16), torch.randn(8, 16)
    module = Regions(autoshard.replicate(2), autoshard.replicate(2))

    def planned(cluster: str) -> PipelinePlan:
        plan = autoshard.plan(
            module,
            {"pp": 2, "x": 2},
            batch,
            search=autoshard.Search(effort="fast"),
            pipeline=autoshard.Pipeline(microbatches=2),
            cluster=cluster,
        )
        assert isinstance(plan, PipelinePlan)
        return plan

    fast, slow, mixed = map(planned, ("4xV100", "4xP100", "2xV100 + 2xP100"))
    assert mixed.costs[0].forward_seconds == pytest.approx(fast.costs[0].forward_seconds, rel=1e-12)
    assert mixed.costs[1].backward_seconds == pytest.approx(slow.costs[1].backward_seconds, rel=1e-12)
    assert fast.costs[0].forward_seconds < slow.costs[0].forward_seconds
    assert mixed.capacities == (fast.capacities[0], slow.capacities[1])
    cost = CostModel(Cluster.parse("2xV100 + 2xP100"), MESH)
    least = LeastWork(GraphRules(capture(module, batch, {}), MESH), cost)
    assert 0 < least.seconds(Shape(MESH, "pp"), [2]) <= mixed.step_seconds


def test_work_is_in_proportion_to_what_the_operators_take() -> None:
    """In half precision, V100s multiply matrices six times as fast as P100s; in single, one and a half times."""
    with torch.device("meta"):
        module, batch = Deep().half(), (torch.empty(2**14, 2048).half(), torch.empty(2**14, 2048).half())
    said = {"microbatches": 8, "virtual": 1, "cluster": "2xV100 + 2xP100", "effort": "fast"}
    plan = autoshard.plan(module, {"pp": 2, "x": 2}, batch, **grouped(said))  # type: ignore[arg-type]
    assert isinstance(plan, PipelinePlan)
    first, last = (cost.forward_seconds + cost.backward_seconds for cost in plan.costs)
    assert first == pytest.approx(last, rel=0.35)
    layers = [sum(name.endswith("weight") for name in stage.placements) for stage in plan.stages]
    assert layers[0] > 2 * layers[1]
