"""The ranks and meshes of a pipeline's stages, their clusters, and their shares of every microbatch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import MeshError, PlanError
from autoshard.patterns.graph_rules import GraphRules
from autoshard.pipeline.graph.stages import assign_stages
from autoshard.pipeline.plan.pipeline_devices import (
    ALONE,
    PipelineMesh,
    has_sample_per_rank,
    memory_share,
    scale_to_shares,
    stage_clusters,
    stage_devices,
)
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.search.shapes import Shape
from autoshard.search.step_bounds import LeastWork
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests.option_groups import grouped
from tests.pipeline.pipelines import assert_equal, model, pipeline_of, train_model_alone, train_pipeline
from tests.pipeline.random_graphs import chain
from tests.pipeline.small_pipelines import Regions
from tests.training import Rows, fast_links, loss_of, outputs_of, unlike_devices
from tests.workers import Workers

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


UNEQUAL_MESH = {"pp": 2, "dp": 2}
SHARES = {"dp": (4, 2)}
UNLIKE = Cluster.parse("2xV100-32GB + 2xP100-16GB")
ACROSS = {"dp": 2, "pp": 2}
"""Of the cluster above: every stage has a device of each kind."""


def planned(name: str, options: dict[str, Any], **said: Any) -> PipelinePlan:
    module, inputs = model(name, **options)
    said = {"cluster": fast_links(), "shares": SHARES, "microbatches": 2, "schedule": "1F1B", "effort": "fast", **said}
    with Float64Mode():
        plan = autoshard.plan(module, UNEQUAL_MESH, (), inputs, recompute="none", **grouped(said))
    assert isinstance(plan, PipelinePlan)
    return plan


def on_ranks(name: str, options: dict[str, Any], plan: PipelinePlan) -> dict[str, torch.Tensor]:
    """What training finds on this process."""
    module, inputs = model(name, **options)
    return train_pipeline(pipeline_of(module, inputs, PipelinePlan.from_json(plan.to_json())), inputs)


def in_other_calls(plan: PipelinePlan) -> tuple[torch.Tensor, torch.Tensor, set[int]]:
    """Losses in evaluation and with half the batch, and how many rows this process activates in the latter."""
    module, inputs = model("mlp", batch=12)
    pipeline = pipeline_of(module, inputs, plan)
    with default_float64():
        whole = pipeline.eval_step(**inputs).loss
        with Rows() as seen:
            half = pipeline.train_step(**{name: tensor[:6] for name, tensor in inputs.items()})
    assert whole is not None
    return whole, half, seen.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt", {"layers": 1, "tied": True}, {}),
        ("gpt", {"layers": 1}, {"schedule": "InterleavedZeroBubble", "hints": {"*.weight": {"dp": Shard(0)}}}),
    ],
)
def test_numbers_are_those_of_one_device(four: Workers, name: str, options: dict[str, Any], said: Any) -> None:
    options = {"batch": 12, **options}
    plan = planned(name, options, **said)
    assert all(stage.shares == SHARES for stage in plan.stages)
    crossing = [row[0] for row in plan.stages[0].output_placements.values()]
    assert any(placement.is_shard() for placement in crossing)
    assert_equal(four.run(on_ranks, name, options, plan), train_model_alone(name, 1, **options))


@pytest.mark.slow
def test_other_calls_are_taken_in_the_same_shares(four: Workers) -> None:
    plan = planned("mlp", {"batch": 12})
    alone, inputs = model("mlp", batch=12)
    half = {name: tensor[:6] for name, tensor in inputs.items()}
    expected = [loss_of(outputs_of(alone(**batch))).detach() for batch in (inputs, half)]
    found = four.run(in_other_calls, plan)
    for *losses, _ in found:
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0.0)
    assert [rows for *_, rows in found] == [{2}, {1}, set(), set()]  # the first of two stages activates


def test_shares_in_proportion_to_speed_make_the_step_shorter() -> None:
    """Stages with a device of each kind: the faster ones take more of every microbatch."""

    def made(shares: str | None) -> PipelinePlan:
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
            inputs = {"x": torch.empty(2**16, 1024), "target": torch.empty(2**16, 1024)}
            module = WithLoss(module)
        plan = autoshard.plan(
            module,
            ACROSS,
            (),
            inputs,
            cluster=UNLIKE,
            shares=shares,
            pipeline=autoshard.Pipeline(microbatches=8, virtual=1),
        )
        assert isinstance(plan, PipelinePlan)
        return plan

    uneven, equal = made("auto"), made(None)
    assert not equal.in_shares
    assert uneven.step_seconds < equal.step_seconds
    for stage in uneven.stages:
        faster, slower = stage.shares["dp"]
        assert faster + slower == 2**13
        assert 900 / 732 < faster / slower < 15.7 / 10.6
    assert "of 8192 rows on" in str(uneven)
    assert any("equal shares" in line.verdict for line in uneven.table)
    # Where all devices of a stage are alike, there is nothing to share.
    with torch.device("meta"):
        module, inputs = WithLoss(nn.Linear(64, 64)), {"x": torch.empty(64, 64), "target": torch.empty(64, 64)}
    alike = autoshard.plan(
        module, UNEQUAL_MESH, (), inputs, cluster=UNLIKE, pipeline=autoshard.Pipeline(microbatches=2)
    )
    assert isinstance(alike, PipelinePlan)
    assert not alike.in_shares


@pytest.mark.slow
def test_stages_with_shares_beside_stages_without(four: Workers) -> None:
    """Devices of the first stage are alike; the others are so fast with another that all that counts is compute."""
    options = {"layers": 1, "batch": 12}
    plan = planned("gpt", options, cluster=unlike_devices("3xV100 + 1xP100"), shares="auto", virtual=1)
    assert [stage.shares for stage in plan.stages] == [{}, {"dp": (4, 2)}]
    assert_equal(four.run(on_ranks, "gpt", options, plan), train_model_alone("gpt", 1, **options))


class WithLoss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.module(x), target)


def test_microbatches_too_small_for_the_shares_are_refused() -> None:
    with pytest.raises(PlanError, match="microbatches of 2 samples, 2 of a batch of 4, can't be taken in shares"):
        planned("mlp", {"batch": 4}, shares={"dp": (9, 1)})
    assert planned("mlp", {"batch": 12}, microbatches="auto").microbatches in (2, 4, 6)


def test_a_share_of_none_is_none() -> None:
    assert has_sample_per_rank({}, 1)
    assert has_sample_per_rank({"dp": (4, 2)}, 2)
    assert not has_sample_per_rank({"dp": (9, 1)}, 2)


def test_memory_is_that_of_the_device_with_the_least_room_for_its_share() -> None:
    mesh = MeshShape.of({"dp": 2})
    one = Cluster.parse("1xV100-32GB + 1xP100-16GB")
    assert memory_share({}, one, mesh, 1e12) == 1.0
    assert (
        memory_share({"dp": (3, 1)}, one, mesh, 1e12) == 1.5 / 2
    )  # half as much as its memory could be of the smaller
    assert memory_share({"dp": (3, 1)}, one, mesh, 8e9) == 1.5
    assert memory_share({"dp": (1, 3)}, one, mesh, 1e12) == 1.5
    costs = StageCosts(
        forward_seconds=1.0,
        input_backward_seconds=1.0,
        weight_backward_seconds=1.0,
        forward_bytes=8,
        rest_bytes=7,
        saved_bytes=10,
        weight_saved_bytes=4,
        working_bytes=6,
    )
    assert scale_to_shares(costs, {}, 1.0) == costs
    less, more = scale_to_shares(costs, {"dp": (3, 1)}, 0.5), scale_to_shares(costs, {"dp": (3, 1)}, 1.5)
    assert (less.rest_bytes, less.saved_bytes, less.weight_saved_bytes, less.working_bytes) == (7, 5, 2, 6)
    assert (more.rest_bytes, more.saved_bytes, more.weight_saved_bytes, more.working_bytes) == (7, 15, 6, 9)
    assert less.forward_bytes == more.forward_bytes == 12


def refused_by_plain_modules() -> None:
    module, inputs = model("mlp")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match="no dim that is split along it can be divided in 3 equal parts"):
        autoshard.parallelize(module, mesh, (), inputs, shares=SHARES)


def test_without_a_pipeline_what_is_split_has_to_be_divisible_or_a_dynamic_size(two: Workers) -> None:
    two.run(refused_by_plain_modules)


MIXED = Cluster.parse("4xV100-32GB + 4xP100-16GB")


def test_the_ranks_of_a_stage_have_its_coordinate() -> None:
    mesh = PipelineMesh.of(MeshShape.of({"dp": 2, "pp": 2, "tp": 2}), "pp")
    assert mesh.devices == (1, 1)
    assert [mesh.members(rank) for rank in range(mesh.ranks)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert mesh.stage(0) == mesh.stage(1) == MeshShape.of({"dp": 2, "tp": 2})


def test_ranks_with_several_devices_of_the_axis_have_a_mesh_of_them() -> None:
    mesh = PipelineMesh.of(MeshShape.of({"dp": 2, "pp": 4}), "pp", (1, 3))
    assert (mesh.ranks, mesh.starts) == (2, (0, 1))
    assert [mesh.rank_at(place) for place in range(4)] == [0, 1, 1, 1]
    assert [mesh.members(rank) for rank in range(2)] == [(0, 4), (1, 2, 3, 5, 6, 7)]
    assert [mesh.stage(rank) for rank in range(2)] == [MeshShape.of({"dp": 2}), MeshShape.of({"dp": 2, "pp": 3})]
    alone = PipelineMesh.of(MeshShape.of({"pp": 4}), "pp", (3, 1))
    assert [alone.stage(rank) for rank in range(2)] == [MeshShape.of({"pp": 3}), MeshShape((ALONE,))]


def pipeline(**mesh: int) -> PipelineMesh:
    return PipelineMesh.of(MeshShape.of(mesh), "pp")


def test_stages_have_the_figures_of_their_slowest_device() -> None:
    v100, p100 = Cluster.preset("v100"), Cluster.preset("p100")
    devices = stage_devices(MIXED, pipeline(pp=4, dp=2))
    assert [device.memory for device in devices] == [32e9, 32e9, 16e9, 16e9]
    faster = v100.device.peak_flops["float32"] / p100.device.peak_flops["float32"]
    assert [device.speed for device in devices] == pytest.approx([faster, faster, 1.0, 1.0])
    inside, network = (v100.inside.bandwidth, p100.inside.bandwidth), v100.between.bandwidth
    assert [device.bandwidth for device in devices] == [inside[0], network, inside[1], math.inf]
    with pytest.raises(MeshError, match="has no rank 8"):
        stage_devices(MIXED, pipeline(pp=4, dp=3))


def test_a_stage_across_kinds_is_as_its_slowest_device() -> None:
    devices = stage_devices(MIXED, pipeline(dp=4, pp=2))
    assert [(device.memory, device.speed) for device in devices] == [(16e9, 1.0)] * 2


def test_a_faster_first_stage_gets_its_part_of_the_work() -> None:
    """V100s do 15.7 where P100s do 10.6 TFLOP/s: three fifths of 25 equal nodes."""
    devices = stage_devices(MIXED.of_ranks((0, 4)), pipeline(pp=2))
    stages = assign_stages(chain([1.0] * 25, [8] * 24), devices, [2, 1])
    assert list(stages.stage_of.values()).count(0) == 15
