"""Meshes whose ranks all live in one process, and what the ranks hold there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork, Work
from torch._ops import OpOverload
from torch.distributed import _local_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, _c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from autoshard.runtime.shards import gather_full_tensor, local_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


@contextmanager
def patched_local_tensors() -> Iterator[None]:
    """Context in which torch's tensors of all ranks take less time, and exchange what they hold."""
    with (
        mock.patch.object(_c10d, "_local_broadcast_", _broadcast),
        mock.patch.object(LocalTensorMode, "__torch_dispatch__", _dispatch),
        mock.patch.object(LocalTensor, "__torch_dispatch__", classmethod(_dispatch_on_tensor)),
        mock.patch.object(_local_tensor, "_for_each_rank_run_func", _run_for_each_rank),
    ):
        yield


@contextmanager
def simulated_mesh(**sizes: int) -> Iterator[DeviceMesh]:
    """A mesh with these axes; every tensor made inside is one per rank."""
    mesh = MeshShape.of(sizes)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        with (
            patched_local_tensors(),
            LocalTensorMode(mesh.size),
        ):
            yield init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    finally:
        dist.destroy_process_group()


def _dispatch(
    mode: LocalTensorMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """torch's own dispatch sends collectives on a tensor that all ranks hold alike, such as an input of the step, to
    the fake backend, whose results are whatever lay in memory: here, ranks exchange what they hold.

    A subclass of the mode would not be known to the operators that are registered for the mode.
    """
    if mode._disable and not types:
        return func(*args, **(kwargs or {}))  # torch's own does the same, after a look through all arguments
    if (answer := _layout_of_ranks(func, args)) is not None:
        return answer
    if types and not mode._disable and all(kind is LocalTensor for kind in types):
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # nothing is under way
        if func not in _LAYOUT and _is_plain(func):
            return _run_for_each_rank(func, mode.ranks, args, kwargs or {})
    exchanges = func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.wait_tensor.default
    if not mode._disable and (exchanges or func is torch.ops.c10d.broadcast_.default):

        def of_ranks(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, LocalTensor) else LocalTensor(dict.fromkeys(sorted(mode.ranks), tensor))

        args, kwargs = pytree.tree_map_only(Tensor, of_ranks, (args, kwargs))
    if not mode._disable and func.namespace == "c10d":
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        apart = all(isinstance(tensor, LocalTensor) for tensor in tensors)
        assert apart, f"{func} changes a tensor of all ranks in place"
    return _dispatch_of_torch(mode, func, types, args, kwargs)


_dispatch_of_torch = LocalTensorMode.__torch_dispatch__


def _dispatch_on_tensor(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Run an operator on tensors of ranks where no mode is active."""
    answer = _layout_of_ranks(func, args)
    return _dispatch_on_tensor_of_torch(func, types, args, kwargs) if answer is None else answer


_dispatch_on_tensor_of_torch = LocalTensor.__torch_dispatch__
_LAYOUT: dict[Any, Any] = {
    torch.ops.aten.sym_size.default: Tensor.size,
    torch.ops.aten.sym_stride.default: Tensor.stride,
    torch.ops.aten.sym_storage_offset.default: Tensor.storage_offset,
    torch.ops.aten.dim.default: Tensor.dim,
}


def _layout_of_ranks(func: Any, args: tuple[Any, ...]) -> Any:
    """Return sizes, strides or the offset of a tensor that lies alike on all ranks; None for all other questions.

    Every view is asked for them twice.
    """
    if (ask := _LAYOUT.get(func)) is None or not isinstance(args[0], LocalTensor):
        return None
    answers = {ask(tensor) for tensor in args[0]._local_tensors.values()}
    return answers.pop() if len(answers) == 1 else None


def _run_for_each_rank(
    func: Any, ranks: frozenset[int], args: Sequence[Any], kwargs: dict[str, Any], *, alias: bool = True
) -> Any:
    """Run an operator for every rank in less time than torch's own, which sets the state of random numbers for each."""
    if not _is_plain(func):
        return _run_of_torch(func, ranks, args, kwargs, alias=alias)
    results = {rank: func(*_of_rank(args, rank), **_of_rank(kwargs, rank)) for rank in sorted(ranks)}
    if _local_tensor._is_inplace_op(func):
        return args[0]
    combined = _local_tensor._combine_rank_results(results, None)
    return return_and_correct_aliasing(func, args, kwargs, combined) if alias and _makes_views(func) else combined


_run_of_torch = _local_tensor._for_each_rank_run_func


@functools.cache
def _is_plain(func: Any) -> bool:
    """Return True for operators of torch that draw nothing, and that torch treats like all others."""
    special = (torch.ops.aten.split.Tensor, torch.ops.aten.hash_tensor.default)
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in special:
        return False
    return not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & set(func.tags)


@functools.cache
def _makes_views(func: OpOverload) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _of_rank(value: Any, rank: int) -> Any:
    """Return what a rank has of an argument, or of every argument in a list or a dictionary."""
    if isinstance(value, LocalTensor):
        return value._local_tensors[rank]
    if isinstance(value, (list, tuple)):
        return type(value)([_of_rank(item, rank) for item in value])
    if isinstance(value, dict):
        return {name: _of_rank(item, rank) for name, item in value.items()}
    if isinstance(value, AsyncCollectiveTensor):
        return _of_rank(value.wait(), rank)
    return _local_tensor._map_to_rank_local_val(value, rank)


@contextmanager
def one_device(kind: str) -> Iterator[DeviceMesh]:
    """A mesh of one device of some kind."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield DeviceMesh(kind, [0], mesh_dim_names=("a",))
    finally:
        dist.destroy_process_group()


def _broadcast(tensors: list[Tensor], group: Any, root: int, *options: Any) -> tuple[list[Tensor], Any]:
    """A broadcast from the member of every group that is `root` in it, also where the members are no neighbours.

    torch's own simulation counts `root` from the first member by ranks of the world.
    """
    members, offsets, _ = _c10d._prepare_collective_groups(group)
    for offset in offsets:
        held = [tensors[0]._local_tensors[offset + member] for member in members]
        for value in held:
            value.copy_(held[root])
    return tensors, Work.boxed(FakeWork())


def per_rank(tensor: Tensor, mesh: DeviceMesh) -> dict[tuple[int, ...], Tensor]:
    """What every rank holds of a tensor: local tensors of a `DTensor`, values of a plain one."""
    value = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    coordinates = list(MeshShape.of(mesh).coordinates())
    if isinstance(value, LocalTensor):
        return {place: value._local_tensors[rank] for rank, place in enumerate(coordinates)}
    return dict.fromkeys(coordinates, value)


PLACEMENTS = ("R", "S(0)", "S(1)", "S(0,f=2)", "S(0,f=3)", "S(1,f=2)")
SPECS = [Spec.parse(f"{first} {second}") for first, second in itertools.product(PLACEMENTS, PLACEMENTS)]


def get_full(module: nn.Module, name: str) -> Tensor:
    """Return the whole parameter or buffer under a qualified name, on every rank."""
    owner, _, leaf = name.rpartition(".")
    return gather_full_tensor(getattr(module.get_submodule(owner), leaf))
