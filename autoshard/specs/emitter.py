"""The interface that local programs are written to: operators and collectives on the tensors of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from autoshard.specs._torch import collectives
from autoshard.specs.axes import MeshShape, SharedAxis

__all__ = ["GRADIENT_BUCKET_BYTES", "Emitter", "EmitterWithShares", "all_reduce", "collective", "collectives"]

# The default of torch's DistributedDataParallel (`bucket_cap_mb`).
GRADIENT_BUCKET_BYTES = 25 * 2**20
"""The number of bytes up to which gradients are reduced together."""


class Emitter(Protocol):
    """Records operators on local values in a graph, or runs them at once.

    A value is whatever the emitter returns. No program branches on a coordinate: one program serves all ranks.
    """

    mesh: MeshShape
    home: torch.device
    """The device of the program's tensors."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value of one operator call; a tuple of values where the operator has several results."""

    def coordinate(self, axis: int) -> Any:
        """Return this rank's coordinate on an axis: a 0-d int64 value on the program's device."""

    def host_coordinate(self, axis: int) -> Any:
        """Return the coordinate as a CPU value, which the host reads without waiting for a device."""

    def group(self, axis: int) -> str:
        """Return the name of the process group of this rank's line along an axis."""

    def seed(self) -> Any:
        """Return the step's random seed, equal on all ranks: a 0-d int64 value on the CPU."""

    def stream(self) -> int:
        """Return a new number for every random operator of the program, equal on all ranks."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the local shape of a value."""

    def dtype(self, value: Any) -> torch.dtype:
        """Return the element type of a value."""

    def device(self, value: Any) -> torch.device:
        """Return the device of a value."""


def collective(emit: Emitter, op: Any, value: Any, *args: Any, axis: int) -> Any:
    """Return the result of a functional collective over a mesh axis, awaited; the axis's group is the last argument."""
    return emit.call(collectives.wait_tensor.default, emit.call(op, value, *args, emit.group(axis)))


def all_reduce(emit: Emitter, value: Any, axis: int, reduction: str = "sum") -> Any:
    """Reduce `value` over one mesh axis."""
    return collective(emit, collectives.all_reduce.default, value, reduction, axis=axis)


@runtime_checkable
class EmitterWithShares(Protocol):
    """An emitter in whose program the ranks of the axis `shared` hold unequal shares of a dynamic size."""

    shared: SharedAxis

    def share(self, expr: Any) -> int:
        """Return a number of the program, from an expression in the symbols of the shares."""

    def shape_with_shares(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a local shape with a rank's share in place of a block."""
