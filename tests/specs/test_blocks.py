"""Blocks: dims whose loops an axis does not divide, padded to whole blocks."""

from __future__ import annotations

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import (
    PADDING,
    canonical,
    is_even,
    local_indices,
    local_shape,
    padded_indices,
    padded_segments_of,
    spec_of,
    true_local_shape,
)
from autoshard.specs.spec import BlockShard, Spec
from autoshard.specs.tensors import shard, unshard
from tests.specs.strategies import blocked_shapes

MESH = MeshShape.of({"dp": 2, "tp": 4})


def held(shape: tuple[int, ...], text: str, mesh: MeshShape, dim: int = 0) -> list[list[int]]:
    """Padded indices along a dim, of every rank."""
    spec = Spec.parse(text)
    return [list(padded_indices(shape, spec, mesh, coordinate)[dim]) for coordinate in mesh.coordinates()]


def test_blocks_keep_inner_loops_whole() -> None:
    """Six rows of two on an axis of four: two rows each, none for the last; `Shard` would give each rank three."""
    assert held((12,), "S(0,b=4)", MeshShape.of({"tp": 4})) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [-1] * 4]
    assert held((12,), "S(0)", MeshShape.of({"tp": 4}))[3] == [9, 10, 11]


def test_padding_stands_behind_every_stretch() -> None:
    """Three heads of one element inside a fused (3, heads), on two ranks."""
    assert held((9,), "S(0,f=3,b=2)", MeshShape.of({"tp": 2})) == [[0, 1, 3, 4, 6, 7], [2, -1, 5, -1, 8, -1]]


def test_another_axis_splits_what_an_even_one_left() -> None:
    assert held((6,), "S(0) S(0,b=2)", MeshShape.of({"dp": 2, "tp": 2})) == [[0, 1], [2, -1], [3, 4], [5, -1]]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("R S(0,b=24)", "R S(0)"),
        ("R S(0,f=2,b=12)", "R S(0,f=2)"),
        ("S(0) S(0,b=12)", "S(0) S(0)"),
        ("R S(0,b=32)", "R S(0,b=32)"),
        ("R S(-1,b=32)", "R S(0,b=32)"),
    ],
)
def test_blocks_that_another_placement_says_are_that(text: str, normal: str) -> None:
    assert canonical((96,), Spec.parse(text), MESH) is Spec.parse(normal)


def test_an_uneven_dim_of_its_own_is_a_plain_shard() -> None:
    assert canonical((7,), Spec.parse("R S(0,b=2)"), MESH) is Spec.parse("R S(0)")


@pytest.mark.parametrize("text", ["R S(0,b=8)", "R S(0,f=5,b=8)", "S(0,b=64) S(0,b=32)", "R S(0,b=0)"])
def test_what_blocks_can_not_hold_is_refused(text: str) -> None:
    """Too short for the dim, stretches that do not divide it, two uneven axes, nothing."""
    with pytest.raises(ValueError, match="does not divide dim 0"):
        local_shape((96,), Spec.parse(text), MESH)


def test_text_and_pickle() -> None:
    spec = Spec.of(BlockShard(0, 8), BlockShard(1, 4, split_factor=3))
    assert str(spec) == "S(0,b=8) S(1,f=3,b=4)"
    assert Spec.parse(str(spec)) is spec is pickle.loads(pickle.dumps(spec))
    assert spec.shard_axes == (0, 1)
    assert spec.has_blocks
    assert BlockShard(0, 8) == spec[0] != BlockShard(0, 4)
    assert len({BlockShard(0, 8), spec[0]}) == 1
    assert repr(spec[1]) == "BlockShard(dim=1, block=4, split_factor=3)"


@given(blocked_shapes())
def test_specs_and_loops_are_inverse(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    assert canonical(shape, spec, mesh) is spec
    assert spec_of(padded_segments_of(shape, spec, mesh), {}, mesh) is spec
    assert not (spec.has_blocks and is_even(shape, spec, mesh))


@given(blocked_shapes())
def test_blocks_divide_the_tensor(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    ranks = [local_indices(shape, spec, mesh, coordinate) for coordinate in mesh.coordinates()]
    elements = [element for indices in ranks for element in itertools.product(*indices)]
    copies = math.prod(size for axis, size in enumerate(mesh.sizes) if axis not in spec.shard_axes)
    assert len(elements) == math.prod(shape) * copies
    assert set(elements) == set(itertools.product(*map(range, shape)))


@given(blocked_shapes())
def test_shards_go_and_come(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    plain = {place: shard(whole, spec, mesh, place) for place in mesh.coordinates()}
    padded = {place: shard(whole, spec, mesh, place, padded=True, padding=math.nan) for place in mesh.coordinates()}
    assert {tuple(local.shape) for local in padded.values()} == {local_shape(shape, spec, mesh)}
    for place in mesh.coordinates():
        assert tuple(plain[place].shape) == true_local_shape(shape, spec, mesh, place)
        assert int(padded[place].isnan().sum()) == padded[place].numel() - plain[place].numel()
        outside = [index == PADDING for index in padded_indices(shape, spec, mesh, place)[0]]
        assert padded[place].isnan().all(dim=1).tolist() == outside
    assert torch.equal(unshard(plain, spec, mesh, shape), whole)
    assert torch.equal(unshard(padded, spec, mesh, shape), whole)
