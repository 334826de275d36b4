"""Mesh axes and shapes."""

from __future__ import annotations

import pytest

from autoshard.errors import MeshError
from autoshard.specs import MeshAxis, MeshShape
from tests.reshard.ranks import ranks


def test_a_mapping_names_axes_in_order() -> None:
    mesh = MeshShape.of({"dp": 2, "tp": 3})
    assert mesh.axes == (MeshAxis("dp", 2), MeshAxis("tp", 3))
    assert (mesh.names, mesh.sizes, mesh.ndim, mesh.size) == (("dp", "tp"), (2, 3), 2, 6)
    assert mesh.index("tp") == 1
    assert str(mesh) == "dp=2, tp=3"
    assert MeshShape.of(mesh) is mesh


def test_coordinates_are_in_rank_order() -> None:
    with ranks(dp=2, tp=3) as world:
        places = [tuple((world.device_mesh.mesh == rank).nonzero()[0].tolist()) for rank in range(6)]
        assert list(MeshShape.of(world.device_mesh).coordinates()) == places
        assert MeshShape.of(world.device_mesh) == world.mesh


@pytest.mark.parametrize("mesh", [{}, {"dp": 0}, {"dp": True}, {"dp": 1.5}, 8, {"dp": 10**30}])
def test_what_is_no_mesh_is_refused(mesh: object) -> None:
    with pytest.raises(MeshError):
        MeshShape.of(mesh)  # type: ignore[arg-type]


def test_an_unknown_axis_is_named_with_those_there_are() -> None:
    with pytest.raises(MeshError, match=r"no axis 'pp'.*dp=2, tp=2"):
        MeshShape.of({"dp": 2, "tp": 2}).index("pp")
