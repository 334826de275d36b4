"""The emitter that runs all ranks in one process."""

from __future__ import annotations

import pytest
import torch

from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import all_reduce, collectives

aten = torch.ops.aten
MESH = MeshShape.of({"x": 2, "y": 3})


def _ranks(emit: Lockstep) -> PerRank:
    """Every rank's number, in six elements."""
    return PerRank(tuple(torch.full((6,), float(rank)) for rank in range(emit.mesh.size)))


def test_operators_run_on_every_rank() -> None:
    emit = Lockstep(MESH)
    doubled = emit.call(aten.mul.Tensor, _ranks(emit), 2)
    assert [value[0].item() for value in doubled.values] == [0, 2, 4, 6, 8, 10]
    assert (emit.shape(doubled), emit.dtype(doubled), emit.device(doubled).type) == ((6,), torch.float32, "cpu")


def test_several_results_come_as_a_tuple() -> None:
    emit = Lockstep(MESH)
    left, right = emit.call(aten.split.Tensor, _ranks(emit), 3)
    assert emit.shape(left) == emit.shape(right) == (3,)


def test_lists_of_values_are_taken_apart() -> None:
    emit = Lockstep(MESH)
    value = _ranks(emit)
    assert emit.shape(emit.call(aten.cat.default, [value, value])) == (12,)


def test_coordinates_follow_the_order_of_ranks() -> None:
    emit = Lockstep(MESH)
    assert [value.item() for value in emit.coordinate(0).values] == [0, 0, 0, 1, 1, 1]
    assert [value.item() for value in emit.coordinate(1).values] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("axis", "reduction", "expected"),
    [
        (0, "sum", [3, 5, 7, 3, 5, 7]),
        (1, "sum", [3, 3, 3, 12, 12, 12]),
        (1, "max", [2, 2, 2, 5, 5, 5]),
        (0, "min", [0, 1, 2, 0, 1, 2]),
        (1, "avg", [1, 1, 1, 4, 4, 4]),
        (0, "product", [0, 4, 10, 0, 4, 10]),
    ],
)
def test_all_reduce(axis: int, reduction: str, expected: list[float]) -> None:
    emit = Lockstep(MESH)
    reduced = all_reduce(emit, _ranks(emit), axis, reduction)
    assert [value[0].item() for value in reduced.values] == expected


def test_gather_scatter_and_exchange() -> None:
    emit = Lockstep(MESH)
    value, group = _ranks(emit), emit.group(1)
    gathered = emit.call(collectives.all_gather_into_tensor.default, value, 3, group)
    assert gathered.values[4].tolist() == [3.0] * 6 + [4.0] * 6 + [5.0] * 6
    joined = emit.call(collectives.all_gather_into_tensor_coalesced.default, [value, value], 3, group)
    assert [part.values[4].tolist() for part in joined] == [gathered.values[4].tolist()] * 2
    scattered = emit.call(collectives.reduce_scatter_tensor.default, value, "sum", 3, group)
    assert scattered.values[1].tolist() == [3.0, 3.0]
    exchanged = emit.call(collectives.all_to_all_single.default, value, [2, 2, 2], [2, 2, 2], group)
    assert exchanged.values[0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_streams_are_numbered_and_the_seed_is_shared() -> None:
    emit = Lockstep(MESH, seed=7)
    assert [emit.stream(), emit.stream()] == [0, 1]
    assert {value.item() for value in emit.seed().values} == {7}
