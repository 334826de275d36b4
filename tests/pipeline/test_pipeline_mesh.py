"""Which ranks of a mesh a pipeline's stages have, and the meshes that these make up."""

from __future__ import annotations

import math

import pytest

from autoshard.cluster import Cluster
from autoshard.errors import MeshError
from autoshard.pipeline.assign.pipeline_mesh import ALONE, PipelineMesh, stage_devices
from autoshard.pipeline.assign.stages import assign_stages
from autoshard.specs.axes import MeshShape
from tests.pipeline.random_graphs import chain

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
