from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.ring import lower_shifts, shift, shift_axes, split_sizes
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from tests.runtime.meshes import per_rank, simulated_mesh


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
def test_all_ranks_in_lockstep(steps: int) -> None:
    emit = Lockstep(MeshShape.of({"x": 2, "y": 3}))
    value = PerRank(tuple(torch.full((2,), float(rank)) for rank in range(6)))
    shifted = emit.call(shift, value, steps, emit.group(1))
    assert [one[0].item() for one in shifted.values] == [(rank - steps) % 3 + 3 * (rank // 3) for rank in range(6)]


@pytest.mark.parametrize("steps", [1, 2])
def test_all_ranks_as_local_tensors(steps: int) -> None:
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
