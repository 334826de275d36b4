"""Which meshes a number of devices can be laid out as."""

from __future__ import annotations

import dataclasses

import pytest

from autoshard.cluster.cluster import Cluster
from autoshard.search.shapes import Shape, coarser_shapes, shapes, straddle_reason
from autoshard.specs.axes import MeshShape

CLUSTER = Cluster.of("v100")  # eight devices to a host


def texts(devices: int, pipeline: str, hosts_of: int = 8) -> set[str]:
    cluster = dataclasses.replace(CLUSTER, devices_per_host=hosts_of)
    return {str(shape) for shape in shapes(devices, cluster, pipeline)}  # type: ignore[arg-type]


def test_two_hosts_of_eight() -> None:
    sharded = {"x=16", "x=2, y=8", "x=8, y=2", "x=4, y=4", "x=2, y=4, z=2", "x=4, y=2, z=2"}
    stages = {"pp=2, x=8", "pp=2, x=4, y=2", "pp=4, x=4", "pp=4, x=2, y=2", "pp=8, x=2", "pp=16"}
    assert texts(16, "none") == sharded
    assert texts(16, "outer") == sharded | stages


def test_axes_over_equal_links_come_in_one_order() -> None:
    """Inside one host every order of axes is the same; where an axis leaves the host, it is not."""
    assert texts(6, "none") == {"x=6", "x=3, y=2"}
    assert texts(6, "none", hosts_of=2) == {"x=6", "x=3, y=2", "x=2, y=3"}
    assert texts(8, "none", hosts_of=1) == {"x=8", "x=4, y=2", "x=2, y=2, z=2"}


def test_stages_that_are_neighbours_may_share_a_host() -> None:
    assert {"x=8, pp=2", "x=2, pp=8", "x=2, y=4, pp=2", "x=4, y=2, pp=2"} <= texts(16, "inner")


def test_one_device_and_a_prime_number() -> None:
    assert texts(1, "outer") == {"x=1"}
    assert texts(7, "outer") == {"x=7", "pp=7"}


def test_every_shape_has_all_devices_and_a_place() -> None:
    for devices in (12, 16, 24):
        for shape in shapes(devices, CLUSTER, "outer"):
            assert shape.mesh.size == devices
            assert shape.ranks * shape.devices_per_rank == devices


def test_promising_ones_come_first() -> None:
    """An axis inside hosts and one between them; then pipelines, the shorter first; then axes that are split."""
    found = [str(shape) for shape in shapes(16, CLUSTER, "outer")]
    assert found[:5] == ["x=2, y=8", "pp=2, x=8", "pp=4, x=4", "pp=8, x=2", "pp=16"]
    assert found[5:8] == ["x=2, y=4, z=2", "pp=2, x=4, y=2", "pp=4, x=2, y=2"]
    assert found[8:] == ["x=16", "x=8, y=2", "x=4, y=4", "x=4, y=2, z=2"]


@pytest.mark.parametrize(
    ("axes", "refused"),
    [
        ({"pp": 2, "x": 6}, True),
        ({"pp": 3, "x": 4}, False),
        ({"pp": 6, "x": 2}, False),
        ({"x": 4, "pp": 3}, True),
        ({"x": 6, "pp": 2}, False),
    ],
)
def test_stages_of_twelve_devices_keep_to_hosts(axes: dict[str, int], refused: bool) -> None:
    assert (straddle_reason(Shape(MeshShape.of(axes), "pp"), CLUSTER) is not None) == refused


def test_what_needs_no_second_host_straddles_none() -> None:
    assert straddle_reason(Shape(MeshShape.of({"pp": 2, "x": 3}), "pp"), CLUSTER) is None


def test_axes_over_equal_links_are_joined() -> None:
    def of(axes: dict[str, int], axis: str | None = None) -> list[str]:
        return [str(shape) for shape in coarser_shapes(Shape(MeshShape.of(axes), axis), CLUSTER)]

    assert of({"x": 2, "y": 4, "z": 2}) == ["x=2, y=8"]
    assert of({"x": 4, "y": 2, "z": 8}) == ["x=8, y=8"]
    assert of({"pp": 4, "x": 2, "y": 2}, "pp") == ["pp=4, x=4"]
    assert of({"x": 2, "y": 2, "pp": 2}, "pp") == ["x=4, pp=2"]
    assert of({"x": 2, "y": 8}) == []
