from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.patterns.exchanging import define, lower_shifts, program_of, shift, shift_axes, split_sizes
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from tests.runtime.meshes import per_rank, simulated_mesh


def _program(x, times, *, group, collective):
    """Doubles the sum over the ranks, `times` times."""
    for _ in range(times):
        x = 2 * collective(collectives.all_reduce.default, x.contiguous(), "sum", group)
    return x, x[0]


def _shapes(x, times, *, group):
    return torch.empty_like(x), x.new_empty(x.shape[1:])


DOUBLED = define("test_doubled(Tensor x, int times, *, str group) -> (Tensor, Tensor)", _program, _shapes)


def test_all_ranks_in_lockstep() -> None:
    emit = Lockstep(MeshShape.of({"x": 2, "y": 3}))
    value = PerRank(tuple(torch.full((2,), float(rank)) for rank in range(6)))
    results = emit.call(DOUBLED, value, 2, group=emit.group(1))
    for result in results:
        assert [one.max().item() for one in result.values] == [36.0] * 3 + [144.0] * 3


def test_all_ranks_as_local_tensors() -> None:
    with simulated_mesh(x=2, y=3) as mesh:
        own = torch.full((2, 4), mesh.get_local_rank("y"), dtype=torch.float64)
        results = DOUBLED(own, 2, group=mesh.get_group("y").group_name)
        for result in results:
            assert all(value.eq(36).all() for value in per_rank(result, mesh).values())


def test_tensors_without_numbers_need_no_group() -> None:
    with FakeTensorMode():
        assert [tuple(result.shape) for result in DOUBLED(torch.empty(2, 3), 5, group="none")] == [(2, 3), (3,)]


def test_other_operators_have_no_program() -> None:
    assert program_of(DOUBLED) is _program
    assert program_of(torch.ops.aten.add.Tensor) is None


# Rings.


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 2), (2, 2, 2)])
def test_every_rank_meets_what_every_other_one_held(sizes: tuple[int, ...]) -> None:
    at = [0] * len(sizes)
    met = {tuple(at)}
    for axis in shift_axes(sizes):
        at[axis] = (at[axis] + 1) % sizes[axis]
        met.add(tuple(at))
    assert len(shift_axes(sizes)) + 1 == len(met) == len(list(itertools.product(*map(range, sizes))))


def test_what_one_rank_sends_another_receives() -> None:
    received, sent = zip(*(split_sizes(5, 2, rank, 3) for rank in range(3)), strict=True)
    assert [list(row) for row in zip(*sent, strict=True)] == list(received)
    assert received[0] == [0, 5, 0]


@pytest.mark.parametrize("steps", [1, 2, -1])
def test_a_shift_in_lockstep(steps: int) -> None:
    emit = Lockstep(MeshShape.of({"x": 2, "y": 3}))
    value = PerRank(tuple(torch.full((2,), float(rank)) for rank in range(6)))
    shifted = emit.call(shift, value, steps, emit.group(1))
    assert [one[0].item() for one in shifted.values] == [(rank - steps) % 3 + 3 * (rank // 3) for rank in range(6)]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_shift_of_local_tensors(steps: int) -> None:
    with simulated_mesh(x=2, y=3) as mesh:
        own = torch.full((2, 4), mesh.get_local_rank("x") * 3 + mesh.get_local_rank("y"), dtype=torch.float64)
        shifted = collectives.wait_tensor(shift(own, steps, mesh.get_group("y").group_name))
        for (x, y), value in per_rank(shifted, mesh).items():
            assert value.tolist() == torch.full((2, 4), float(x * 3 + (y - steps) % 3)).tolist()


def test_lowered_for_one_rank() -> None:
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta["val"] = torch.empty(5, 3)
    dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    try:
        group = dist.group.WORLD.group_name
        graph.output(graph.call_function(shift, (value, 2, group)))
        lower_shifts(graph)
    finally:
        dist.destroy_process_group()
    (node,) = graph.find_nodes(op="call_function", target=collectives.all_to_all_single.default)
    (rows,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert rows.args == (value, 0)  # as many as there are when it runs
    assert node.args == (value, [rows, 0, 0], [0, rows, 0], group)
    assert not graph.find_nodes(op="call_function", target=shift)
