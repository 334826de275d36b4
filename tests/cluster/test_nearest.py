"""The cluster of the GPU that is there, with stand-ins of what torch tells of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.cluster import Cluster, CostModel
from autoshard.cluster.nearest import cluster_of, default_cluster
from autoshard.specs.axes import MeshShape


def properties(name: str, gib: float, processors: int, **more: int) -> Any:
    return SimpleNamespace(name=name, total_memory=int(gib * 2**30), multi_processor_count=processors, **more)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100S-PCIE-32GB", "v100s"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_of_the_presets_are_known_by_name(name: str, preset: str, caplog: pytest.LogCaptureFixture) -> None:
    assert cluster_of(properties(name, 80, 132)) == Cluster.preset(preset)
    assert not caplog.records


def test_an_unknown_device_is_the_nearest_preset_scaled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "autoshard")
    reported = properties(
        "NVIDIA GeForce RTX 4090", 24, 128, memory_clock_rate=10_501_000, memory_bus_width=384, major=8, minor=9
    )
    cluster, near = cluster_of(reported), Cluster.preset("l40s")
    assert cluster.device.memory == 24 * 2**30
    assert cluster.device.memory_bandwidth == pytest.approx(1.008e12, rel=1e-3)
    assert cluster.device.peak(torch.bfloat16) == pytest.approx(near.device.peak(torch.bfloat16) * 128 / 142)
    assert (cluster.inside, cluster.between) == (near.inside, near.between)
    (record,) = caplog.records
    for message in ("RTX 4090", "24 GiB", "1008 GB/s", "128 multiprocessors", "l40s", "autoshard.calibrate"):
        assert message in record.getMessage()


def test_kernels_of_a_scaled_device_take_as_much_longer_as_it_is_slower() -> None:
    half = properties("half an A100", 80, 54, memory_clock_rate=1_593_000 // 2, memory_bus_width=5120, major=8, minor=0)
    mesh = MeshShape.of({"x": 1})
    scaled, whole = CostModel(cluster_of(half), mesh), CostModel(Cluster.preset("a100"), mesh)
    assert "a100" in scaled.cluster.name
    work, bytes = 2.0 * 8192**3, 6.0 * 8192**2
    product = scaled.compute(work, bytes, torch.bfloat16, "mm")
    product /= whole.compute(2 * work, 2 * bytes, torch.bfloat16, "mm")
    assert product == pytest.approx(1.0, rel=1e-2)
    moved = scaled.compute(0.0, 1e9, torch.bfloat16) / whole.compute(0.0, 1e9, torch.bfloat16)
    assert moved == pytest.approx(2.0, rel=2e-2)


def test_without_clock_and_width_bandwidth_goes_by_the_multiprocessors() -> None:
    cluster = cluster_of(properties("NVIDIA H800 PCIe", 80, 114, major=9, minor=0))
    near = Cluster.preset("h100")
    assert cluster.device.memory_bandwidth == pytest.approx(near.device.memory_bandwidth * 114 / 132)


def test_a_mesh_chooses_by_its_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cluster("cpu").name == "cpu"
    assert default_cluster(None).name == "h100"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties("Tesla T4", 15, 40))
    assert default_cluster("cuda").name == "t4"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_cluster("cuda").name == "h100"
