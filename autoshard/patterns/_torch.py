"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _dispatch_has_kernel_for_dispatch_key as _has_kernel  # whether a device has a kernel
from torch._C import _dispatch_key_for_device as _dispatch_key  # the dispatch key of a device
from torch._library.custom_ops import CustomOpDef  # what torch.library.custom_op returns
from torch._ops import (
    OpOverload,  # the type of an operator such as torch.ops.aten.mm.default
    OpOverloadPacket,  # the type of torch.ops.aten.mm, all overloads of one name
)
from torch._subclasses import FakeTensorMode  # runs an operator on shards for its result shapes
from torch.distributed._local_tensor import (
    LocalTensor,  # the tensors of all ranks, as one tensor
    LocalTensorMode,  # active where one process holds the tensors of all ranks
    maybe_disable_local_tensor_mode,  # leaves it for a while
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # the group of a name
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec,  # a tensor on a mesh, as torch's sharding strategies see it
    TensorMeta,  # its shape, strides and element type
)
from torch.distributed.tensor._op_schema import (
    OpSchema,  # a call, as torch's sharding strategies see it
    OpSpec,  # one strategy
    OpStrategy,  # the strategies of an operator, or the placements that an operand may have
    TupleStrategy,  # operands in a list
)
from torch.utils._python_dispatch import _disable_current_modes  # rules are looked up inside dispatch modes

__all__ = ["CustomOpDef", "DTensorSpec", "FakeTensorMode", "LocalTensorMode", "OpOverload", "OpOverloadPacket"]
__all__ += ["OpSchema", "OpStrategy", "TensorMeta", "TupleStrategy"]


def make_local_tensor(values: Sequence[Tensor]) -> Tensor:
    """One tensor for the tensors of ranks 0, 1, ...: operators on it run once per rank."""
    return LocalTensor(dict(enumerate(values)))


def rank_values(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors of ranks 0, 1, ...: the inverse of `make_local_tensor`."""
    assert isinstance(tensor, LocalTensor), type(tensor)
    return tuple(value for _, value in sorted(tensor._local_tensors.items()))


def rank_and_size(group: str) -> tuple[int, int]:
    """This rank's index in a group, and the size of the group."""
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]  # later releases give names a type of their own
    return ranks.rank(), ranks.size()


def has_philox(device_type: str) -> bool:
    """Return True if torch has its stateless Philox generator for devices of this type."""
    names = ("_philox_uniform_", "_philox_normal_")
    return all(
        hasattr(torch.ops.aten, name) and _has_kernel(f"aten::{name}", _dispatch_key(device_type)) for name in names
    )


def philox_uniform_(values: Tensor, key: int, offset: int, low: float, high: float) -> Tensor:
    """Fill a floating-point tensor with uniform numbers in [low, high) from torch's stateless generator.

    Args:
        values: the tensor, on a device that `has_philox`.
        key: 64 bits.
        offset: position of the first number in the key's stream; at most one number per element is used.
        low, high: ends of the interval.
    """
    pair = _philox_key(key, offset, values.device)
    filled: Tensor = torch.ops.aten._philox_uniform_(values, pair, low, high)  # since torch 2.13, on CUDA
    return filled


def philox_normal_(values: Tensor, key: int, mean: float, std: float) -> Tensor:
    """Fill a floating-point tensor with normal numbers; arguments as for `philox_uniform_`."""
    pair = _philox_key(key, 0, values.device)
    filled: Tensor = torch.ops.aten._philox_normal_(values, pair, mean, std)  # likewise, of normal numbers
    return filled


def _philox_key(key: int, offset: int, device: torch.device) -> Tensor:
    """Key and offset as torch takes them, set by `fill_`: a copy from the host would wait for the device."""
    pair = torch.empty(2, dtype=torch.int64, device=device)
    for place, number in enumerate((key, offset)):
        pair[place].fill_(number - (1 << 64) if number >> 63 else number)
    return pair.view(torch.uint64)


StrategyFunction = Callable[..., Any]
"""A function of torch's registry: from a call to its sharding strategies."""

_dispatcher = DTensor._op_dispatcher
_registry = _dispatcher.sharding_propagator


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Context that disables the active dispatch modes, such as a tracer's."""
    with maybe_disable_local_tensor_mode(), _disable_current_modes():
        yield


def single_axis_strategy_function(op: OpOverload) -> StrategyFunction | None:
    """The registered function that lists placements of an operator's results and operands on one axis, if any."""
    return getattr(_registry, "op_single_dim_strategy_funcs", {}).get(op)  # younger than torch 2.11's first releases


def mesh_strategy_function(op: OpOverload) -> StrategyFunction | None:
    """The function from an `OpSchema` to an `OpStrategy` on a whole mesh, if one is registered."""
    return _registry.op_strategy_funcs.get(op)


def runs_unchanged(op: OpOverload) -> bool:
    """Return True if DTensor runs the operator itself on the shards, with unchanged arguments.

    For some operators it changes arguments that are shapes or counts; for others it has custom handlers.
    """
    changed = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
    handled = getattr(_dispatcher, "_custom_op_handlers", {})
    return op not in handled and not any(op in getattr(_registry, name, {}) for name in changed)


def dtensor_meta(shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    """A contiguous tensor, as torch's strategies see it."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorMeta(torch.Size(shape), strides, dtype)


def one_device_strategy(meta: TensorMeta, placements: Sequence[Placement]) -> OpStrategy:
    """An operand that may have any of these placements on a mesh of one device."""
    specs = (DTensorSpec(_one_device_mesh(), (placement,), tensor_meta=meta) for placement in placements)
    return OpStrategy([OpSpec(spec, input_specs=()) for spec in specs])


@cache
def _one_device_mesh() -> DeviceMesh:
    """A mesh of one device, which needs no process group."""
    return DeviceMesh("cpu", [0], mesh_dim_names=("axis",), _init_backend=False, _rank=0)


def schema_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpSchema:
    """A call, as torch's strategies see it; operands are `OpStrategy`, lists of them `TupleStrategy`."""
    return OpSchema(op, tuple(args), dict(kwargs), schema_info=_registry.op_to_schema_info.get(op))


def overload_for(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The overload that torch would call with these arguments; `RuntimeError` if there is none."""
    # as torch does when it traces a call of a packet
    name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return getattr(packet, name)
