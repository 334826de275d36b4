"""Tensors that a call changes in place: as on one device, or refused before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import autoshard
from autoshard.errors import CaptureError, InputError
from autoshard.runtime.in_place_changes import has_overlap
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.shards import gather_full_tensor
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links

Change = Callable[["Changing", Tensor, Tensor], Any]
X, Y = (torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with simulated_mesh(x=2) as mesh:
        yield mesh


class Changing(nn.Module):
    """Does something with its inputs and its buffer first."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("total", torch.zeros(4, 8, dtype=torch.float64))
        self.change = change

    def forward(self, x: Tensor, y: Tensor) -> Any:
        built = self.change(self, x, y)
        return (self.linear(x) * y).sum(), built


def _both(change: Change, mesh: DeviceMesh, call: Callable[[nn.Module], Sequence[Tensor]]) -> None:
    """A call leaves the same numbers on the mesh as on one device."""
    module = Changing(change)
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (X.clone(), Y.clone()), cluster=fast_links())
    for ours, expected in zip(call(module), call(alone), strict=True):
        for held in per_rank(ours.detach(), mesh).values():
            torch.testing.assert_close(held, expected.detach(), rtol=1e-9, atol=1e-12)


def _doubles(module: Changing, x: Tensor, y: Tensor) -> None:
    y.mul_(2)


def _counts(module: Changing, x: Tensor, y: Tensor) -> Any:
    module.total += x
    return module.total, module.total[1:3], module.total.view(2, 16).t()


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: Y.t().contiguous().t(),
    "every second row": lambda: Y.repeat_interleave(2, 0)[::2],
    "part of another": lambda: torch.cat([Y, Y])[4:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_input_is_changed_as_it_lies_in_memory(mesh: DeviceMesh, layout: str) -> None:
    def call(module: nn.Module) -> Sequence[Tensor]:
        y = LAYOUTS[layout]()
        return module(X.clone(), y)[0], y

    _both(_doubles, mesh, call)


def test_an_input_that_is_placed_otherwise_is_changed(mesh: DeviceMesh) -> None:
    for placement in (Shard(1), Replicate()):
        y = distribute_tensor(Y.clone(), mesh, [placement])
        module = Changing(_doubles)
        autoshard.parallelize(module, mesh, (X.clone(), Y.clone()), cluster=fast_links())
        module(X.clone(), y)
        for held in per_rank(y.full_tensor(), mesh).values():
            torch.testing.assert_close(held, 2 * Y)


class Cached(nn.Module):
    """Writes a row of a cache, and reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        cache.index_copy_(1, position, self.linear(x)[:, None])
        return torch.einsum("bd,btd->bt", x, cache)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(1), Replicate()])
def test_a_cache_is_written_where_it_lies(mesh: DeviceMesh, placement: Placement | None) -> None:
    module = Cached()
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, cluster=fast_links())
    expected = torch.zeros(4, 6, 8, dtype=torch.float64)
    cache = expected.clone() if placement is None else distribute_tensor(expected.clone(), mesh, [placement])
    with torch.no_grad():
        for step, x in enumerate((X, Y)):
            scores = alone(x, expected, torch.tensor([2 * step]))
            ours = module(x.clone(), cache, torch.tensor([2 * step]))
            for held in per_rank(ours, mesh).values():
                torch.testing.assert_close(held, scores, rtol=1e-9, atol=1e-12)
    for held in per_rank(gather_full_tensor(cache) if isinstance(cache, DTensor) else cache, mesh).values():
        torch.testing.assert_close(held, expected, rtol=1e-9, atol=1e-12)
    # One program, which takes the cache as it lies, and writes the row alone where no rank needs another one's.
    (served,) = module.__dict__[RUNTIME].programs.table.values()
    (spec,) = (border.spec for border in served.program.step.inputs if border.name == "cache")
    assert spec.placements == (placement or Replicate(),)
    written = {node.target for node in served.program.halves.forward.graph.nodes}
    assert placement != Shard(0) or torch.ops.aten.index_copy_.default in written


def test_returned_buffers_change_with_later_calls(mesh: DeviceMesh) -> None:
    def call(module: nn.Module) -> Sequence[Tensor]:
        _, returned = module(X.clone(), Y.clone())
        module(Y.clone(), Y.clone())
        return returned  # type: ignore[no-any-return]

    _both(_counts, mesh, call)


def test_returned_inputs_are_those_that_were_changed(mesh: DeviceMesh) -> None:
    def call(module: nn.Module) -> Sequence[Tensor]:
        y = Y.clone()
        returned = module(X.clone(), y)[1]
        returned.add_(1)
        return y, returned

    _both(lambda module, x, y: y.mul_(2), mesh, call)


SHARED: dict[str, tuple[Change, Callable[[Changing], tuple[Tensor, Tensor]], str]] = {
    "the same twice": (_doubles, lambda module: (X, X), "the input y in place, and the input x looks at the same"),
    "a buffer": (_doubles, lambda module: (X, module.total), "the input y in place, and the buffer total looks"),
    "a changed buffer": (_counts, lambda module: (X, module.total), r"buffer total .* input y looks .* y.clone\(\)"),
    "expanded": (_doubles, lambda module: (X, Y[:1].expand(4, 8)), r"y in place, and several .* y.clone\(\)"),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_change_of_memory_that_others_look_at_is_refused(mesh: DeviceMesh, name: str) -> None:
    change, given, message = SHARED[name]
    module, before = Changing(change), X.clone()
    autoshard.parallelize(module, mesh, (X.clone(), Y.clone()), cluster=fast_links())
    with pytest.raises(InputError, match=message):
        module(*given(module))
    assert torch.equal(X, before)
    assert not module.total.any()
    module(X.clone(), Y.clone())


def test_views_overlap_where_they_have_an_element_in_common() -> None:
    base = torch.arange(32).view(4, 8)
    assert has_overlap(base[:2], base[1:])
    assert has_overlap(base[:, 3], base[2])
    assert has_overlap(base.view(torch.float64), base[0])
    assert not has_overlap(base[:2], base[2:])
    assert not has_overlap(base[:, :4], base[:, 4:])
    assert not has_overlap(base[::2], base[1::2])
    assert not has_overlap(base[:0], base)
    assert not has_overlap(base, base.clone())


@pytest.mark.parametrize(
    "change",
    [lambda module, x, y: y.mul_(2).t_().t_(), lambda module, x, y: y.unsqueeze_(0)],
    ids=["transposed", "one dim more"],
)
def test_another_shape_in_place_is_refused(mesh: DeviceMesh, change: Any) -> None:
    module = Changing(change)
    with pytest.raises(
        CaptureError, match=r"another shape, in place.*test_in_place_changes.py|test_in_place_changes.py.*another shape"
    ):
        autoshard.parallelize(module, mesh, (X.clone(), Y.clone()))


class Viewing(nn.Linear):
    """Returns a view of what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, -1)


def test_an_output_that_is_a_view_may_be_changed_in_place(mesh: DeviceMesh) -> None:
    module = Viewing(8, 8, dtype=torch.float64)
    alone = copy.deepcopy(module)
    autoshard.parallelize(module, mesh, (X.clone(),), cluster=fast_links())
    for each in (module, alone):
        each(X).mul_(2).square().sum().backward()
    assert alone.weight.grad is not None
    for held in per_rank(gather_full_tensor(module.weight.grad), mesh).values():
        torch.testing.assert_close(held, alone.weight.grad, rtol=1e-9, atol=1e-12)


def test_mutation_of_saved_tensors_is_refused_by_its_line(mesh: DeviceMesh) -> None:
    module = Viewing(8, 8, dtype=torch.float64)
    autoshard.parallelize(module, mesh, (X.clone(),), cluster=fast_links())
    refused = pytest.raises(InputError, match=r"test_in_place_changes.py:\d+ \(module\(X\)\) calls .* outside of it")
    with torch.autograd.graph.allow_mutation_on_saved_tensors(), refused:
        module(X)
