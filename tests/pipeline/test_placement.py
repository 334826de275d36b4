"""Stages, replicas and ranks on devices of different memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.errors import MeshError, PipelineError
from autoshard.pipeline.assign.pipeline_mesh import PipelineMesh
from autoshard.pipeline.assign.placement import place_stages, sort_by_memory, stage_devices
from autoshard.pipeline.assign.stages import assign_stages
from autoshard.specs.axes import MeshShape
from tests.pipeline.random_graphs import chain

EQUAL = Cluster.preset("v100")
MIXED = Cluster.parse("4xP100-16GB + 4xV100-32GB")


def test_figure_5_of_whale() -> None:
    """Two stages of two devices each on eight: the replicas of a model on consecutive devices."""
    assert place_stages(EQUAL, 8, [2, 2]) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))


def test_replicas_of_a_stage_can_share_a_host_instead() -> None:
    assert place_stages(EQUAL, 8, [2, 2], together="stage") == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def test_stages_may_ask_for_different_numbers() -> None:
    assert place_stages(EQUAL, 6, [2, 1]) == (((0, 1), (3, 4)), ((2,), (5,)))


def test_earlier_stages_have_larger_memories_and_replicas_equal_ones() -> None:
    """Whale's pipeline of Figure 18: four stages, each twice, on four large and four small devices."""
    placed = place_stages(MIXED, 8, [1] * 4)
    assert placed == (((4,), (5,)), ((6,), (7,)), ((0,), (1,)), ((2,), (3,)))


def test_a_replica_of_the_model_is_ordered_by_memory_as_well() -> None:
    mixed = Cluster.parse("1xP100 + 1xV100 + 1xP100 + 1xV100")
    assert place_stages(mixed, 4, [1, 1], together="model") == (((1,), (3,)), ((0,), (2,)))


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from(["auto", "model", "stage"])
)
def test_every_rank_is_used_once_and_memories_fall(requested: list[int], replicas: int, together) -> None:
    devices = sum(requested) * replicas
    cluster = Cluster.parse(f"{devices}xP100 + {devices}xV100").of_ranks(range(devices // 2, devices // 2 + devices))
    placed = place_stages(cluster, devices, requested, together=together)
    assert [[len(ranks) for ranks in stage] for stage in placed] == [[count] * replicas for count in requested]
    assert sorted(itertools.chain(*itertools.chain(*placed))) == list(range(devices))
    for replica in range(replicas):
        memories = [cluster.device_of(rank).memory for stage in placed for rank in stage[replica]]
        assert memories == sorted(memories, reverse=True)


def test_devices_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"10 devices are no multiple of the 4 .*\(2 \+ 2\): use 8 of them"):
        place_stages(EQUAL, 10, [2, 2])
    with pytest.raises(PipelineError, match=r"2 devices are no multiple of the 4 .*: use 4 of them"):
        place_stages(EQUAL, 2, [2, 2])
    with pytest.raises(PipelineError, match="each asks for one at least"):
        place_stages(EQUAL, 2, [2, 0])
    with pytest.raises(MeshError, match="the mesh has 12 devices and cluster"):
        place_stages(MIXED, 12, [2, 2])


def test_equal_memories_keep_their_order() -> None:
    assert sort_by_memory(MIXED, [0, 4, 1, 5]) == (4, 5, 0, 1)


def pipeline(**mesh: int) -> PipelineMesh:
    return PipelineMesh.of(MeshShape.of(mesh), "pp")


def test_stages_have_the_figures_of_their_slowest_device() -> None:
    v100, p100 = Cluster.preset("v100"), Cluster.preset("p100")
    mesh = pipeline(pp=4, dp=2)
    ranks = [rank for stage in place_stages(MIXED, 8, [1] * 4) for (rank,) in stage]
    devices = stage_devices(MIXED, mesh, ranks=ranks)
    assert [device.memory for device in devices] == [32e9, 32e9, 16e9, 16e9]
    faster = v100.device.peak_flops["float32"] / p100.device.peak_flops["float32"]
    assert [device.speed for device in devices] == pytest.approx([faster, faster, 1.0, 1.0])
    inside, network = (v100.inside.bandwidth, p100.inside.bandwidth), v100.between.bandwidth
    assert [device.bandwidth for device in devices] == [inside[0], network, inside[1], math.inf]
    half = stage_devices(MIXED, mesh, ranks=ranks, dtype=torch.float16)
    assert half[0].speed == pytest.approx(125 / 21.2)


def test_a_stage_across_kinds_is_as_its_slowest_device() -> None:
    devices = stage_devices(MIXED, pipeline(dp=4, pp=2))
    assert [(device.memory, device.speed) for device in devices] == [(16e9, 1.0)] * 2


def test_a_faster_first_stage_gets_its_part_of_the_work() -> None:
    """V100s do 15.7 where P100s do 10.6 TFLOP/s: three fifths of 25 equal nodes."""
    stages = assign_stages(chain([1.0] * 25, [8] * 24), stage_devices(MIXED, pipeline(pp=2), ranks=(4, 0)), [2, 1])
    assert list(stages.stage_of.values()).count(0) == 15
