"""What kernels demand of their operands, checked in one way."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class State:
    """Where a GPU's generator stands: numbers that it gives depend on both."""

    seed: int = 0
    offset: int = 0

    @property
    def number(self) -> int:
        """One number for both."""
        return self.seed + self.offset


def draw_state(probability: float) -> State:
    """The state of the default generator, which then goes on; it stays as it is where nothing is dropped."""
    if not probability:
        return State()
    generator = torch.default_generator
    seed, state = generator.initial_seed(), generator.get_state()
    fresh = torch.equal(state, torch.Generator().manual_seed(seed).get_state())
    offset = 0 if fresh else 1 + zlib.crc32(state.numpy().tobytes())
    torch.rand((), generator=generator)
    return State(seed % (1 << 62), offset)


def state_of(name: str, probability: float, *kept: Tensor | None, dtype: torch.dtype = torch.int64) -> State:
    """The state that forward kept: seed and offset, in two tensors or one."""
    if not probability:
        return State()
    numbers = []
    for tensor in kept:
        assert tensor is not None, f"{name}: dropout in backward needs the state that forward kept"
        assert tensor.dtype == dtype, f"{name}: state of {tensor.dtype}, not {dtype}"
        assert tensor.shape == (2,) if len(kept) == 1 else tensor.dim() == 0, f"{name}: state {list(tensor.shape)}"
        numbers += tensor.flatten().tolist()
    return State(*numbers)


def written_like(value: Tensor, like: Tensor) -> Tensor:
    """The numbers in the type and layout of `torch.empty_like(like)`, which must have their shape."""
    return torch.empty_like(like).copy_(value)
