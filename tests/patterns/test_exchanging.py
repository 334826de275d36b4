from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoshard.patterns.exchanging import define, program_of
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
