"""Along which axes ranks have rows of their own, and which rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from autoshard.errors import MeshError
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import axes_of_rows, check_data_axes, find_data_axes, names_with_batch, part_of_rows
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard

MESH = MeshShape.of({"dp_replicate": 2, "dp_shard": 3, "tp": 2})
AXES = ("dp_replicate", "dp_shard")


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"dp_replicate": 2, "dp_shard": 3, "tp": 2}, AXES),
        ({"tp": 4, "fsdp": 2}, ("fsdp",)),
        ({"x": 4}, ("x",)),
        ({"x": 1, "y": 4}, ("y",)),
        ({"x": 1, "y": 1}, ("x",)),
    ],
)
def test_data_axes_are_found_by_their_names_or_as_the_only_axis(sizes: dict[str, int], axes: tuple[str, ...]) -> None:
    assert find_data_axes(MeshShape.of(sizes)) == axes


def test_axes_that_no_name_tells_apart_are_asked_for() -> None:
    with pytest.raises(MeshError, match=r"x=2, y=3.*data_axes=\('x',\)"):
        find_data_axes(MeshShape.of({"x": 2, "y": 3}))
    for wrong in ("dp", ("tp", "ep")):
        with pytest.raises(MeshError, match="out of dp_replicate, dp_shard, tp"):
            check_data_axes(MESH, wrong)
    assert check_data_axes(MESH, ["tp", "dp_shard"]) == ("dp_shard", "tp")


def test_axes_of_placements_are_those_that_split_rows() -> None:
    whole = (Replicate(),) * 3
    assert axes_of_rows(MESH, [whole, (Shard(0), Shard(1), None), (None, Replicate(), Shard(0))]) == (
        "dp_replicate",
        "tp",
    )


def test_parts_are_counted_as_shard_cuts_them() -> None:
    rows, spec = torch.arange(12), Spec.of(Shard(0), Shard(0), Replicate())
    for coordinate in np.ndindex(*MESH.sizes):
        count, index = part_of_rows(MESH, AXES, coordinate)
        assert torch.equal(rows.chunk(count)[index], shard(rows, spec, MESH, coordinate))


def test_the_batch_is_the_first_size_that_most_tensors_have() -> None:
    shapes = {"x": (8, 4), "mask": (4, 4), "labels": (8,), "scale": (), "one": (1, 4)}
    assert names_with_batch(shapes) == {"x", "labels"}
    assert names_with_batch({"x": (1, 4), "scale": ()}) == frozenset()
    assert names_with_batch({"x": (1, 4), "scale": (3,)}, may_be_one=True) == {"x"}
    broadcast = {"positions": (1, 4), "mask": (1, 1, 4, 4)}
    assert names_with_batch({"x": (2, 4), **broadcast}, may_be_one=True) == {"x"}
