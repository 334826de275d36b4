"""What every preset promises: sources, rates below the data sheet, and prices that grow with the work."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from autoshard.cluster import Cluster, CostModel
from autoshard.cluster.measurements import FLOPS, INTENSITY
from autoshard.specs.axes import MeshShape

LINKS = {  # bytes per second and direction of one device, by the data sheet: inside a host, and of its port
    "a100": (300e9, 25e9),
    "a100_40gb": (300e9, 25e9),
    "b200": (900e9, 50e9),
    "h100": (450e9, 50e9),
    "h100_500w": (450e9, 50e9),
    "h200": (450e9, 50e9),
    "l40s": (32e9, 12.5e9),
    "mi300x": (448e9, 50e9),
    "p100": (80e9, 6.25e9),
    "t4": (16e9, 1.5625e9),
    "v100": (150e9, 6.25e9),
    "v100s": (16e9, 12.5e9),
}
NAMES = tuple(name for name in Cluster.presets() if name != "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")
SIZES = [2**power for power in range(10, 34)]


def model(name: str, size: int = 8) -> CostModel:
    return CostModel(Cluster.preset(name), MeshShape.of({"x": size}))


def square(costs: CostModel, size: int, dtype: torch.dtype) -> float:
    return costs.compute(2.0 * size**3, 3 * size**2 * dtype.itemsize, dtype, "mm")


def test_the_links_of_all_presets_are_known() -> None:
    assert set(NAMES) == set(LINKS)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    cluster = Cluster.preset(name)
    device = cluster.device
    figures = {
        "memory",
        "peak_flops",
        "memory_bandwidth",
        "kernel_overhead",
        "dispatch",
        "compiled_dispatch",
        "host_bandwidth",
    }
    assert all(len(device.sources[figure]) > 20 for figure in figures)
    assert all(len(curve.source) > 20 for curve in device.operators.values())
    for link in (cluster.inside, cluster.between):
        assert all(len(link.sources[figure]) > 20 for figure in ("bandwidth", "latency"))
        assert all(len(known_values.curve.source) > 20 for known_values in link.collectives.values())
    assert "arXiv" in cluster.sources["contention"]


@pytest.mark.parametrize("name", NAMES)
def test_no_rate_is_above_the_data_sheet(name: str) -> None:
    device = Cluster.preset(name).device
    for (operator, dtype, unit), curve in device.operators.items():
        if operator == "convolution":
            continue  # cuDNN takes tensor cores for float32, which have a rate of their own
        limit = device.rate(dtype) if unit in (FLOPS, INTENSITY) else device.memory_bandwidth
        assert max(curve.rates) <= limit, (operator, dtype, unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_small_products_are_slower_for_every_operation_and_larger_ones_take_longer(
    name: str, dtype: torch.dtype
) -> None:
    costs = model(name)
    sizes = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    seconds = [square(costs, size, dtype) for size in sizes]
    assert all(less <= more for less, more in pairwise(seconds))
    assert seconds[0] / 128**3 > 2 * seconds[-1] / 16384**3
    assert seconds[-1] < 2.0 * 16384**3 / (0.3 * costs.cluster.device.peak(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_narrow_products_are_slower_for_every_operation(name: str) -> None:
    costs, dtype = model(name), torch.float16

    def rate(narrow: int) -> float:
        flops = 2.0 * 8192 * 8192 * narrow
        return flops / costs.compute(flops, dtype.itemsize * (8192 * 8192 + 2 * 8192 * narrow), dtype, "mm")

    rates = [rate(narrow) for narrow in (16, 64, 256, 1024, 4096)]
    assert all(slow <= fast * (1 + 1e-9) for slow, fast in pairwise(rates))
    assert rates[0] < 0.5 * rates[-1]


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h100_500w", "h200", "l40s", "mi300x"])
def test_attention_is_slower_backward_and_over_short_sequences(name: str) -> None:
    costs = model(name)

    def rate(length: int, operator: str, products: int, tensors: int) -> float:
        tokens, width = 16384, 2048
        flops = products * tokens * length * width  # a causal mask leaves half of two operations
        bytes = tensors * 2 * tokens * width
        return flops / costs.compute(flops, bytes, torch.bfloat16, operator)

    forward = [rate(length, "_scaled_dot_product_flash_attention", 2, 4) for length in (512, 2048, 8192)]
    backward = [rate(length, "_scaled_dot_product_flash_attention_backward", 5, 8) for length in (512, 2048, 8192)]
    for rates in (forward, backward):
        assert rates[0] < rates[1] < rates[2]
    assert backward[2] < forward[2]
    assert forward[2] < 0.75 * 2.0 * 8192**3 / square(costs, 8192, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_memory_bound_kernels_reach_a_share_of_the_bandwidth_and_small_ones_less(name: str) -> None:
    costs = model(name)
    bandwidth = costs.cluster.device.memory_bandwidth
    rates = [size / costs.compute(0.0, size, torch.float32, "add") / bandwidth for size in SIZES]
    assert all(slow < fast for slow, fast in pairwise(rates[:18]))
    assert rates[0] < 0.01
    assert 0.6 < rates[-1] < 0.95


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 64, 512])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_collectives_never_send_faster_than_the_link(name: str, kind: str, devices: int) -> None:
    costs = model(name, devices)
    spans = costs.spans_hosts(0)
    inside, port = LINKS[name]
    ports = max(1, devices // len({costs.cluster.host_of(rank) for rank in range(devices)})) if spans else 1
    link = min(port * ports, inside) if spans else inside
    seconds = [costs.collective(kind, size, 0) for size in SIZES]
    assert all(less <= more * (1 + 1e-9) for less, more in pairwise(seconds))
    for size, chosen in zip(SIZES, seconds, strict=True):
        assert chosen >= _sent(kind, size, devices) / link * (1 - 1e-9)


def _sent(kind: str, size: int, devices: int) -> float:
    """Bytes that one device sends at least: of an all-reduce in the switch all that it has, and its part of the sum."""
    match kind:
        case "all_gather":
            return size * (devices - 1)
        case "shift":
            return size
        case "all_reduce":
            return size * min(2 * (devices - 1) / devices, (devices + 1) / devices)
    return size * (devices - 1) / devices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_small_messages_reach_less_of_the_link_and_the_network_is_slower(name: str, kind: str) -> None:
    near = CostModel(Cluster.preset(name), MeshShape.of({"hosts": 4, "devices": 4}))
    far = CostModel(dataclasses.replace(near.cluster, devices_per_host=4), near.mesh)
    assert far.collective(kind, 2**26, 0) > far.collective(kind, 2**26, 1)
    assert far.collective(kind, 2**12, 1) > 2**12 * far.collective(kind, 2**28, 1) / 2**28


def test_a_group_with_several_devices_on_a_host_uses_all_their_ports() -> None:
    costs = CostModel(Cluster.preset("h100"), MeshShape.of({"hosts": 2, "devices": 8}))
    whole = CostModel(Cluster.preset("h100"), MeshShape.of({"all": 16}))
    size = 2**30
    assert whole.collective("all_reduce", size, 0) < 0.5 * costs.collective("all_reduce", size, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_equal_after_a_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.preset(name)
    cluster.save(tmp_path / "mine.json")
    loaded = Cluster.load(tmp_path / "mine.json")
    assert loaded == cluster
    assert loaded.device.sources == cluster.device.sources
    assert [curve.source for curve in loaded.device.operators.values()] == [
        curve.source for curve in cluster.device.operators.values()
    ]


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_older_versions_are_priced_by_their_figures(version: int) -> None:
    data = json.loads(Cluster.preset("cpu").to_json()) | {"version": version}
    cluster = Cluster.from_json(json.dumps(data))
    costs = CostModel(cluster, MeshShape.of({"x": 4}))
    assert cluster == Cluster.preset("cpu")
    assert costs.compute(5e10, 0.0, torch.float32, "mm") == pytest.approx(1.0 + 5e-6)
    assert costs.collective("all_gather", 1_500_000, 0) == pytest.approx(3 * (1e-4 + 1e-3))


def test_devices_of_several_kinds_keep_the_slowest_of_their_curves() -> None:
    mixed, slow, fast = Cluster.of("4xA100 + 4xV100"), model("v100", 4), model("a100", 4)
    costs = CostModel(mixed, MeshShape.of({"x": 8}))
    assert not mixed.is_uniform
    for one in (slow, fast):
        assert square(costs, 4096, torch.float32) >= square(one, 4096, torch.float32)


def test_compiled_programs_are_dispatched_faster() -> None:
    cluster = Cluster.of("4xA100 + 4xV100").with_compiler
    assert cluster.device.compiled
    assert all(stretch.device.compiled for stretch in cluster.stretches)
    assert cluster.device.dispatch.kernel < Cluster.preset("a100").device.dispatch.kernel
    assert cluster.with_compiler == cluster
