"""Ways in which axes group devices."""

from __future__ import annotations

import math

import pytest

from autoshard.cluster.collective_samples import groupings, groups_of
from autoshard.cluster.measurements import Grouping
from autoshard.specs.axes import MeshShape


def test_groupings_of_eight() -> None:
    found = [(one.size, one.stride) for one in groupings(8)]
    assert found == [(8, 1), (4, 1), (4, 2), (2, 1), (2, 2), (2, 4)]


@pytest.mark.parametrize("sizes", [(2, 4), (2, 2, 2), (3, 2), (6,), (2, 3, 4)])
def test_every_axis_of_a_mesh_groups_its_devices_in_one_of_them(sizes: tuple[int, ...]) -> None:
    mesh = MeshShape.of({f"a{index}": size for index, size in enumerate(sizes)})
    coordinates = list(mesh.coordinates())
    for axis, size in enumerate(sizes):
        grouping = Grouping(size, math.prod(sizes[axis + 1 :]))
        assert grouping in groupings(mesh.size)
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(coordinates):
            lines.setdefault((*place[:axis], *place[axis + 1 :]), []).append(rank)
        assert sorted(groups_of(grouping, mesh.size)) == sorted(lines.values())
