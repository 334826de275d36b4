from __future__ import annotations

import json
import re

import pytest
import torch

from autoshard.cluster import Cluster, Link
from autoshard.cluster.cluster import Devices, is_devices, parse_devices
from autoshard.errors import MeshError

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
