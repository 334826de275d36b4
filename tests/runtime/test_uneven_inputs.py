"""Shards of different lengths: whole sizes are found from those of all ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from autoshard.runtime.uneven_inputs import whole_shapes
from tests.runtime.meshes import simulated_mesh

ROWS, COLUMNS = 2, 3


def part(size: int, ranks: int, rank: int) -> int:
    length = -(-size // ranks)
    return max(0, min(length, size - rank * length))


@given(shape=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_whole_sizes_are_those_that_the_parts_are_of(shape: tuple[int, int]) -> None:
    places = np.ndindex(ROWS, COLUMNS)
    split = np.array([[part(shape[0], ROWS, row), part(shape[1], COLUMNS, column)] for row, column in places])
    alike = np.array([[shape[0], part(shape[1], ROWS, row)] for row, _ in np.ndindex(ROWS, COLUMNS)])
    tables = {
        "split": split.reshape(ROWS, COLUMNS, 2),
        "alike": alike.reshape(ROWS, COLUMNS, 2),
        "scalar": np.zeros((ROWS, COLUMNS, 0), dtype=np.int64),
    }
    placements = {"split": (Shard(0), Shard(1)), "alike": (Shard(-1), Replicate()), "scalar": (Shard(0), Replicate())}
    with simulated_mesh(a=ROWS, b=COLUMNS) as mesh:
        assert isinstance(mesh, DeviceMesh)
        assert whole_shapes(tables, placements, mesh) == {"split": [*shape], "alike": [*shape], "scalar": []}
