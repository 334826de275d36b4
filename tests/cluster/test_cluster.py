"""Clusters: presets, files, texts, and the GPU that is there, with stand-ins of the properties that torch reports."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.cluster import Cluster, CostModel, Link
from autoshard.cluster.cluster import Devices, cluster_of, default_cluster, is_devices, parse_devices
from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape

PRESETS = (
    "a100",
    "a100_40gb",
    "b200",
    "cpu",
    "h100",
    "h100_500w",
    "h200",
    "l40s",
    "mi300x",
    "p100",
    "t4",
    "v100",
    "v100s",
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sane_and_cite_their_source(name: str) -> None:
    cluster = Cluster.preset(name)
    assert cluster.name == name
    assert len(cluster.source) > 40
    assert cluster.inside.bandwidth >= cluster.between.bandwidth
    assert cluster.inside.latency <= cluster.between.latency
    assert cluster.device.peak(torch.float64) <= cluster.device.peak(torch.float32)


def test_the_presets_are_listed() -> None:
    assert Cluster.presets() == PRESETS


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(
        MeshError, match=r"no cluster preset 'b300'; the presets are a100, a100_40gb, b200, cpu, h100, h100_500w, h200"
    ):
        Cluster.preset("b300")


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        (torch.bfloat16, 989e12),
        (torch.float32, 67e12),
        (torch.int64, 67e12),
        (torch.float8_e4m3fn, 1979e12),
        (torch.complex128, 67e12),
    ],
)
def test_every_dtype_has_a_rate(dtype: torch.dtype, rate: float) -> None:
    assert Cluster.preset("h100").device.peak(dtype) == rate


def test_a_cluster_is_equal_after_a_file_and_a_hash_key(tmp_path) -> None:
    cluster = Cluster.preset("a100")
    cluster.save(tmp_path / "mine.json")
    loaded = Cluster.load(tmp_path / "mine.json")
    assert loaded == cluster
    assert {loaded: 1}[cluster] == 1


def test_of_takes_a_cluster_a_name_or_a_path(tmp_path) -> None:
    cluster = Cluster.preset("cpu")
    cluster.save(tmp_path / "mine.json")
    assert Cluster.of(cluster) is cluster
    assert Cluster.of("CPU") == cluster
    assert Cluster.of(tmp_path / "mine.json") == cluster
    assert Cluster.of(str(tmp_path / "mine.json")) == cluster


def test_a_missing_file_is_said_to_be_missing(tmp_path) -> None:
    with pytest.raises(MeshError, match=r"nowhere\.json' cannot be read"):
        Cluster.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices_per_host": 0}, r"at devices_per_host, 0 is less than the minimum"),
        ({"inside": {"bandwidth": -1.0, "latency": 0.0}}, r"at inside\.bandwidth"),
        ({"inside": {"bandwidth": 1.0}}, r"at inside, 'latency' is a required property"),
        ({"speed": 1}, r"at the top level, .*'speed' was unexpected"),
        ({"version": 4}, r"at version"),
    ],
)
def test_what_is_no_cluster_is_refused(change: dict, message: str) -> None:
    data = json.loads(Cluster.preset("cpu").to_json()) | change
    with pytest.raises(MeshError, match=message):
        Cluster.from_json(json.dumps(data))


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(MeshError, match=r"cluster is not JSON"):
        Cluster.from_json("{")


def test_links_compare_by_value() -> None:
    assert Link(1.0, 2.0) == Link(1.0, 2.0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    text = Cluster.preset("a100").to_json()
    for name in sorted(set(re.findall(r'"(\w+)": [0-9.]+', text))):
        edited = re.sub(rf'"{name}": [0-9.e+-]+', f'"{name}": {number}', text, count=1)
        with pytest.raises(MeshError, match=f"{number} is not a finite number"):
            Cluster.from_json(edited)


def test_what_is_no_cluster_is_told_by_its_type() -> None:
    with pytest.raises(MeshError, match=r"cluster=5 is int: pass a Cluster, a preset's name"):
        Cluster.of(5)  # type: ignore[arg-type]


def test_counts_kinds_and_memories_are_read_in_order() -> None:
    assert parse_devices("8xV100-32GB + 8 x p100") == (
        Devices(8, "v100", 32 * 10**9, "V100-32GB"),
        Devices(8, "p100", None, "p100"),
    )


@pytest.mark.parametrize(("text", "devices"), [("8xV100", True), ("v100+p100", True), ("v100", False), ("my", False)])
def test_counts_tell_devices_from_presets(text: str, devices: bool) -> None:
    assert is_devices(text) == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8xV100 +", "'' in the cluster '8xV100 \\+' names no devices: write a count and a preset"),
        ("V100 + 8xP100", "'V100' in the cluster"),
        ("8xV100@25GB/s", "'8xV100@25GB/s' in the cluster"),
        ("0xV100", "is no device at all"),
        ("8xV100-32XB", "has the unit 'XB'"),
        ("8xV100-1.2.3GB", "is not an amount of memory"),
    ],
)
def test_what_is_not_understood_is_quoted(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        parse_devices(text)


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
