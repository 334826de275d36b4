"""An emitter that executes every operator at once on real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.specs.axes import MeshShape

_CPU = torch.device("cpu")


class EagerEmitter:
    """Executes a local program while it is emitted.

    Args:
        mesh: the mesh.
        groups: per axis, the name of the process group of this rank's line.
        coordinate: per axis, this rank's coordinate, a 0-d int64 tensor. Under `LocalTensorMode` they are local
            tensors, and one program runs for all ranks in one process.
        seed: the step's random seed, equal on all ranks.
        home: device of the tensors of the program.
    """

    def __init__(
        self,
        mesh: MeshShape,
        groups: Sequence[str],
        coordinate: Sequence[Tensor],
        seed: int = 0,
        home: torch.device = _CPU,
    ) -> None:
        self.mesh = mesh
        self.home = home
        self._groups = tuple(groups)
        self._coordinate = tuple(coordinate)
        self._seed = seed
        self._streams = 0

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the operator and return its result."""
        return op(*args, **kwargs)

    def coordinate(self, axis: int) -> Tensor:
        """Return this rank's coordinate on an axis."""
        return self._coordinate[axis]

    def host_coordinate(self, axis: int) -> Tensor:
        """Return this rank's coordinate on an axis, on the CPU."""
        return self._coordinate[axis].cpu()

    def group(self, axis: int) -> str:
        """Return the name of the process group along an axis."""
        return self._groups[axis]

    def seed(self) -> Tensor:
        """Return the step's random seed."""
        return torch.tensor(self._seed, dtype=torch.int64)

    def stream(self) -> int:
        """Return a new number for every random operator."""
        self._streams += 1
        return self._streams

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """Return the local shape of a tensor."""
        return tuple(value.shape)

    def dtype(self, value: Tensor) -> torch.dtype:
        """Return the dtype of a tensor."""
        return value.dtype

    def device(self, value: Tensor) -> torch.device:
        """Return the device of a tensor."""
        return value.device

    def is_contiguous(self, value: Tensor) -> bool:
        """Return True if the tensor is row-major in memory."""
        return value.is_contiguous()
