"""Which ranks of a mesh a pipeline's stages have, and the meshes that these make up."""

from __future__ import annotations

from autoshard.pipeline.assign.pipeline_mesh import ALONE, PipelineMesh
from autoshard.specs.axes import MeshShape


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
