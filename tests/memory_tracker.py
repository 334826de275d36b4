"""What a rank really holds: bytes of all live tensor memory, by watching every operator that runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.capture.host_copies import AWAIT_COPY, HOST_TENSORS
from autoshard.reshard.collective_schedule import KEEPS_INPUT
from autoshard.runtime.shards import local_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives
from tests.training import loss_of, outputs_of

_ALLOCATE = "empty_strided_cpu"  # the name in compiled code


@contextmanager
def first_rank(sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """A mesh on which this process is the first rank and the others do not exist.

    Collectives make tensors of the right shapes; what is in them means nothing.
    """
    mesh = MeshShape.of(sizes)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was held at one moment.

    Attributes:
        bytes: held then.
        moment: what ran: `"forward"`, `"backward"` or `"optimizer"`, and the operator.
        largest: the largest pieces of memory held then: bytes, the operator that made them, shape.
    """

    bytes: int = 0
    moment: tuple[str, str] = ("", "")
    largest: tuple[tuple[int, str, tuple[int, ...]], ...] = ()


@dataclass(slots=True)
class _Piece:
    bytes: int
    maker: str
    shape: tuple[int, ...]


@dataclass(eq=False)
class Tracker(TorchDispatchMode):
    """While active, counts the bytes of the memory that operators return, from when it is made to when it is freed.

    Memory that several tensors share counts once. A collective keeps its input until it is awaited.
    What a kernel allocates and frees inside itself is not seen. Code that inductor compiled before allocates without
    operators: its function for that is watched, too.
    """

    phase: str = ""
    held: int = 0
    peaks: dict[str, Peak] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._live: dict[int, _Piece] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._kept: dict[int, list[Any]] = {}  # memory of a collective's result -> its input
        # Modules of compiled code, and the functions by which they allocate.
        self._allocators: list[tuple[Any, Callable[..., torch.Tensor]]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it does without the tracker."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs operators on its local tensor, which then come here
        result = func(*args, **(kwargs or {}))
        if func in KEEPS_INPUT:  # as NCCL does, whatever the backend
            keeps = [args[0]]
            self._kept |= {_memory(one): keeps for one in pytree.tree_leaves(result)}
        elif func is collectives.wait_tensor.default:
            self._kept.pop(_memory(args[0]), []).clear()
        # What lies on the host takes nothing of the device.
        if func not in HOST_TENSORS and func is not AWAIT_COPY:
            self.track(pytree.tree_leaves(result), str(func))
        return result

    def __enter__(self) -> Tracker:
        for module in PyCodeCache.modules:
            if hasattr(module, _ALLOCATE):
                self._allocators.append((module, getattr(module, _ALLOCATE)))
                setattr(module, _ALLOCATE, functools.partial(self._allocate, self._allocators[-1][1]))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for module, allocate in self._allocators:
            setattr(module, _ALLOCATE, allocate)
        self._allocators.clear()

    def _allocate(self, allocate: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        result = allocate(*args)
        self.track([result], "compiled code")
        return result

    def track(self, values: Iterable[Any], maker: str) -> None:
        """Count the memory of these tensors until it is freed."""
        for value in values:
            # Fake tensors, in which DTensor looks for placements, hold nothing.
            if isinstance(value, torch.Tensor) and not value.is_meta and not isinstance(value, FakeTensor):
                self._add(local_of(value) if isinstance(value, DTensor) else value, maker)
        peak = self.peaks.get(self.phase, Peak())
        if self.held > peak.bytes:
            pieces = sorted(self._live.values(), key=lambda piece: -piece.bytes)[:40]
            largest = tuple((piece.bytes, piece.maker, piece.shape) for piece in pieces)
            self.peaks[self.phase] = Peak(self.held, (self.phase, maker), largest)

    @property
    def peak(self) -> Peak:
        """Over all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes)

    def _add(self, tensor: torch.Tensor, maker: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live and storage.nbytes():
            self._live[key] = _Piece(storage.nbytes(), maker, tuple(tensor.shape))
            self._watch[key] = weakref.ref(storage, functools.partial(self._remove, key))
            self.held += storage.nbytes()

    def _remove(self, key: int, _: object) -> None:
        self.held -= self._live.pop(key).bytes
        del self._watch[key]


def track_step(
    module: nn.Module, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None, steps: int = 2
) -> Tracker:
    """Train a parallelised module for some steps, and say what the last of them held.

    The step: gradients are set to None, forward, backward, the optimizer's step; what forward returned is held to its
    end, whatever it is nested in.
    """
    tracker = Tracker()
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        if step == steps - 1:
            tracker.phase = "forward"
            state = [value for of in (optimizer.state.values() if optimizer else ()) for value in of.values()]
            tracker.track((*module.parameters(), *module.buffers(), *inputs.values(), *state), "at rest")
            del state
        with tracker if step == steps - 1 else _nothing():
            result = module(**inputs)
            loss = loss_of(outputs_of(result))
            tracker.phase = "backward"
            if loss.requires_grad:
                loss.backward()
            tracker.phase = "optimizer"
            if optimizer is not None:
                optimizer.step()
        del result, loss
    return tracker


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _nothing() -> Iterator[None]:
    yield
