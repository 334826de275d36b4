"""`shard` and `unshard` against each other and against DTensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import is_even, local_shape, true_local_shape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard
from tests.reshard._torch import LocalTensor, LocalTensorMode
from tests.reshard.ranks import ranks
from tests.specs.strategies import placed_shapes

MESH = MeshShape.of({"a": 2, "b": 3})


def whole_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, none of them zero, so that sums, products and averages are exact."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) % 7 - 8


@given(placed_shapes())
def test_unshard_is_the_inverse_of_shard(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    whole = whole_tensor(shape)
    shards = {coordinate: shard(whole, spec, mesh, coordinate) for coordinate in mesh.coordinates()}
    for coordinate, local in shards.items():
        assert local.shape == true_local_shape(shape, spec, mesh, coordinate)
        assert local.is_contiguous()
    assert torch.equal(unshard(shards, spec, mesh, shape), whole)


@pytest.mark.parametrize("text", ["S(0) R", "R S(1)", "P(max) S(0)", "S(1) S(0)"])
def test_padding_goes_and_comes(text: str) -> None:
    spec, whole = Spec.parse(text), whole_tensor((5, 7))
    shards = {place: shard(whole, spec, MESH, place, padded=True) for place in MESH.coordinates()}
    assert {tuple(local.shape) for local in shards.values()} == {local_shape((5, 7), spec, MESH)}
    assert torch.equal(unshard(shards, spec, MESH, (5, 7)), whole)


def test_the_first_rank_holds_a_partial_sum() -> None:
    whole = whole_tensor((4,))
    held = [shard(whole, Spec.parse("P(sum) P(sum)"), MESH, coordinate) for coordinate in MESH.coordinates()]
    assert torch.equal(held[0], whole)
    assert all(not local.any() for local in held[1:])


def test_a_part_has_memory_of_its_own() -> None:
    whole = whole_tensor((4, 4))
    part = shard(whole, Spec.parse("S(0) R"), MESH, (0, 0))
    assert part.untyped_storage().nbytes() == part.nbytes
    assert shard(whole, Spec.all_replicated(2), MESH, (0, 0)) is whole


def test_meta_tensors_are_sharded_without_memory() -> None:
    whole = torch.empty(6, 7, device="meta")
    assert shard(whole, Spec.parse("S(0,f=3) S(1)"), MESH, (1, 2)).shape == (3, 1)


def test_a_missing_shard_is_named() -> None:
    with pytest.raises(ValueError, match=r"no shard for coordinate \(0, 1\)"):
        unshard({(0, 0): torch.zeros(2)}, Spec.parse("S(0) R"), MESH, (4,))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="'bxor'"):
        shard(torch.ones(2), Spec.parse("P(bxor) R"), MESH, (0, 0))


def every_spec(axes: int, texts: tuple[str, ...]) -> list[Spec]:
    return [Spec.parse(" ".join(choice)) for choice in itertools.product(texts, repeat=axes)]


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((2, 2, 2), (16, 8)), ((2, 2, 2), (7, 5)), ((2, 3), (12, 5)), ((3,), (7, 1)), ((4,), (5, 12)), ((2, 1), (4, 3))],
)
def test_shards_are_those_of_distribute_tensor(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    whole = whole_tensor(shape)
    with ranks(**{f"a{axis}": size for axis, size in enumerate(sizes)}) as world, LocalTensorMode(world.mesh.size):
        # torch itself can not cut strided pieces of shards whose sizes differ.
        strided = () if shape == (7, 5) else ("S(0,f=2)",)
        for spec in every_spec(len(sizes), ("R", "S(0)", "S(1)", *strided)):
            placed = distribute_tensor(whole, world.device_mesh, list(spec), src_data_rank=None)
            local = placed.to_local()
            for rank, coordinate in enumerate(world.mesh.coordinates()):
                expected = local._local_tensors[rank] if isinstance(local, LocalTensor) else local
                assert torch.equal(shard(whole, spec, world.mesh, coordinate), expected), (spec, coordinate)


@pytest.mark.parametrize("reduction", ["sum", "avg", "max", "min"])
def test_partial_values_are_what_full_tensor_reduces(reduction: str) -> None:
    whole = whole_tensor((8, 12))
    with ranks(a=2, b=2) as world, LocalTensorMode(4):
        for spec in every_spec(2, ("R", "S(0)", "S(1)", f"P({reduction})")):
            assert is_even(whole.shape, spec, world.mesh)
            local = world.scatter(whole, spec)
            full = DTensor.from_local(local, world.device_mesh, list(spec), run_check=False).full_tensor()
            assert isinstance(full, LocalTensor)
            assert all(torch.equal(value, whole) for value in full._local_tensors.values()), spec
