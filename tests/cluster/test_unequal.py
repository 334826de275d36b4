"""Clusters of several kinds of device."""

from __future__ import annotations

import json

import pytest
import torch

import autoshard
from autoshard.cluster import Cluster, CostModel, Link
from autoshard.errors import BudgetError, MeshError
from autoshard.specs.axes import MeshShape

V100, P100 = Cluster.preset("v100"), Cluster.preset("p100")
MIXED = Cluster.parse("8xV100-32GB + 8xP100-16GB")


def test_ranks_are_in_the_order_of_the_text() -> None:
    assert MIXED.count == 16
    assert not MIXED.is_uniform
    assert [MIXED.device_of(rank) for rank in (0, 7, 8, 15)] == [V100.device] * 2 + [P100.device] * 2
    assert [MIXED.host_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    with pytest.raises(MeshError, match=r"no rank 16: it has 16 devices"):
        MIXED.device_of(16)


def test_the_device_is_what_all_devices_keep() -> None:
    assert MIXED.device.memory == P100.device.memory
    assert MIXED.device.peak(torch.float16) == P100.device.peak(torch.float16)
    assert MIXED.device.memory_bandwidth == P100.device.memory_bandwidth
    assert MIXED.slowest(range(16)) == MIXED.device
    assert MIXED.slowest(range(8)) == V100.device


def test_no_device_is_slower_than_the_slowest_whatever_rates_it_lists() -> None:
    slowest = Cluster.parse("1xH100 + 1xV100").device  # V100s list no rate in eight bits
    assert slowest.peak(torch.float8_e4m3fn) == V100.device.peak(torch.float8_e4m3fn)


def test_a_suffix_replaces_the_memory_of_the_preset() -> None:
    small = Cluster.parse("4xv100-16GB")
    assert small.device.memory == 16 * 10**9
    assert small.device.peak_flops == V100.device.peak_flops
    assert (small.name, small.count, small.is_uniform) == ("4xv100-16GB", 4, True)


def test_hosts_and_network_can_be_said() -> None:
    ethernet = Link(0.78e9, 5e-5)
    cluster = Cluster.parse("4xV100 + 4xP100", devices_per_host=2, between=ethernet)
    assert [cluster.host_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cluster.between == ethernet
    with pytest.raises(MeshError, match="devices_per_host=0"):
        Cluster.parse("4xV100", devices_per_host=0)


def test_of_takes_devices() -> None:
    assert Cluster.of("8xV100-32GB + 8xP100-16GB") == MIXED
    with pytest.raises(MeshError, match="no cluster preset 'z9'"):
        Cluster.of("8xz9")


def test_ranks_of_one_kind_have_its_links() -> None:
    assert MIXED.of_ranks(range(8)).inside == V100.inside
    small = MIXED.of_ranks(range(8, 16))
    assert (small.device, small.inside, small.is_uniform, small.count) == (P100.device, P100.inside, True, 8)
    assert MIXED.inside == P100.inside


def test_ranks_of_a_preset_share_hosts_as_they_did() -> None:
    assert V100.of_ranks(range(16)) is V100
    halves = V100.of_ranks(range(0, 16, 2))
    assert (halves.devices_per_host, halves.count, halves.device) == (4, None, V100.device)
    uneven = V100.of_ranks([7, *range(8, 16)])
    assert [uneven.host_of(rank) for rank in (0, 1, 8)] == [0, 1, 1]
    with pytest.raises(MeshError, match="no rank of cluster v100 was given"):
        V100.of_ranks([])


def test_a_cluster_of_several_kinds_is_equal_after_a_file(tmp_path) -> None:
    MIXED.save(tmp_path / "mixed.json")
    assert Cluster.load(tmp_path / "mixed.json") == MIXED
    assert {Cluster.load(tmp_path / "mixed.json"): 1}[MIXED] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stretches": []}, r"at stretches"),
        ({"device": {}}, r"'device' was unexpected"),
        ({"stretches": [{"count": 0}]}, r"at stretches\.0"),
    ],
)
def test_what_is_no_cluster_of_several_kinds_is_refused(change: dict, message: str) -> None:
    data = json.loads(MIXED.to_json()) | change
    with pytest.raises(MeshError, match=message):
        Cluster.from_json(json.dumps(data))


def test_a_mesh_costs_what_its_slowest_device_and_link_do() -> None:
    both = CostModel(MIXED, MeshShape.of({"kind": 2, "dp": 8}))
    assert both.compute(1e12, 0, torch.float32) == CostModel(P100, both.mesh).compute(1e12, 0, torch.float32)
    assert [both.spans_hosts(axis) for axis in (0, 1)] == [True, False]
    assert both.axis_link(1) == P100.inside
    first = CostModel(MIXED, MeshShape.of({"dp": 8}))
    assert first.compute(1e12, 0, torch.float32) == CostModel(V100, first.mesh).compute(1e12, 0, torch.float32)


def test_kinds_share_no_host() -> None:
    costs = CostModel(Cluster.parse("4xV100 + 4xP100"), MeshShape.of({"dp": 2, "tp": 4}))
    assert [costs.spans_hosts(axis) for axis in (0, 1)] == [True, False]


def test_a_mesh_of_more_devices_is_refused() -> None:
    with pytest.raises(MeshError, match=r"the mesh has 32 devices and cluster 8xV100-32GB \+ 8xP100-16GB 16"):
        CostModel(MIXED, MeshShape.of({"dp": 32}))


def test_a_plan_is_one_that_every_device_keeps() -> None:
    with torch.device("meta"):
        model, batch = torch.nn.Linear(64, 64), torch.empty(16, 64)
    plans = [autoshard.plan(model, {"dp": 16}, (batch,), cluster=cluster) for cluster in ("16xP100", MIXED)]
    assert plans[1].device_memory == P100.device.memory
    assert plans[1].step_seconds >= plans[0].step_seconds
    assert plans[1].cluster == MIXED.name


def test_a_budget_that_cannot_be_met_asks_for_no_device_that_the_cluster_lacks() -> None:
    with torch.device("meta"):
        model, batch = torch.nn.Linear(256, 256), torch.empty(16, 256)
    with pytest.raises(BudgetError, match=r"add devices"):
        autoshard.plan(model, {"dp": 16}, (batch,), cluster=MIXED, memory_limit=1000)
