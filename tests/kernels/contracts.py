"""What kernels demand of their operands, checked in one way."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def check_types(kernel: str, allowed: tuple[torch.dtype, ...], any_type: bool, *tensors: Tensor) -> None:
    """All of one type, and of one that the kernel has; with `any_type`, of float64 too."""
    first = tensors[0].dtype
    assert all(tensor.dtype == first for tensor in tensors), f"{kernel}: types {[str(x.dtype) for x in tensors]} differ"
    known = (*allowed, torch.float32, torch.float64) if any_type else allowed
    assert first in known, f"{kernel}: no kernel for {first}, only for {', '.join(map(str, allowed))}"


def check_shapes(kernel: str, query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> None:
    """Shapes `[b, h, s, d]` that belong together; fewer heads of keys where the kernel is told to allow them."""
    assert query.dim() == key.dim() == value.dim() == 4, f"{kernel}: operands have four dims"
    assert query.shape[0] == key.shape[0] == value.shape[0], f"{kernel}: batches differ"
    assert key.shape[1:3] == value.shape[1:3], f"{kernel}: keys {list(key.shape)}, values {list(value.shape)}"
    assert query.shape[3] == key.shape[3], f"{kernel}: queries and keys have unequal head sizes"
    heads, groups = query.shape[1], key.shape[1]
    if grouped:
        assert heads % groups == 0, f"{kernel}: {heads} heads of queries are no multiple of {groups} of keys"
    else:
        assert heads == groups, f"{kernel}: {heads} heads of queries, {groups} of keys; keys have to be repeated"


def check_last_stride(kernel: str, *tensors: Tensor) -> None:
    """The last dim lies in one piece."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors), f"{kernel}: the last dim is not contiguous"


def check_statistics(kernel: str, statistics: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Forward kept them, in the shape in which it hands them out, in float32 or float64."""
    assert statistics is not None, f"{kernel}: forward was not asked for logsumexp"
    assert tuple(statistics.shape) == shape, f"{kernel}: logsumexp is {list(statistics.shape)}, not {list(shape)}"
    assert statistics.dtype in (torch.float32, torch.float64), f"{kernel}: logsumexp is {statistics.dtype}"
    return statistics


def check_counts(kernel: str, told: tuple[int, int], held: tuple[int, int]) -> None:
    """Numbers of queries and keys that a call names are those of its tensors."""
    assert told == held, f"{kernel}: told of {told[0]} queries and {told[1]} keys, has {held[0]} and {held[1]}"


def draw_seed(probability: float) -> int:
    """The next seed of the default generator, which stays as it is where nothing is dropped."""
    return int(torch.randint(2**31, ())) if probability else 0


def number_of(state: Tensor | None, probability: float) -> int:
    """The seed that forward kept: the first number of its state."""
    if not probability:
        return 0
    assert state is not None, "dropout in backward needs the state that forward kept"
    return int(state.flatten().tolist()[0])


def written_like(value: Tensor, like: Tensor) -> Tensor:
    """The numbers in the type and layout of `torch.empty_like(like)`, which must have their shape."""
    return torch.empty_like(like).copy_(value)
