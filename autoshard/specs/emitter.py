"""The interface that local programs are written to: operators and collectives on the tensors of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from autoshard.specs._torch import collectives
from autoshard.specs.axes import MeshShape
from autoshard.specs.shared_axis import SharedAxis

__all__ = ["GRADIENT_BUCKET_BYTES", "Emitter", "EmitterWithShares", "all_reduce", "collectives"]

GRADIENT_BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced together up to this many bytes, as in torch's DistributedDataParallel."""


class Emitter(Protocol):
    """Takes operators on local values: records them in a graph, or runs them at once.

    A value is whatever the emitter hands out. No program branches on a coordinate: one program serves all ranks.
    """

    mesh: MeshShape
    home: torch.device
    """Where the tensors of the program are."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of one operator call; a tuple of values where the operator has several results."""

    def coordinate(self, axis: int) -> Any:
        """This rank's coordinate on an axis: a 0-d int64 value on the program's device."""

    def host_coordinate(self, axis: int) -> Any:
        """The same on the CPU, for what the host has to know: reading it waits for no device."""

    def group(self, axis: int) -> str:
        """Name of the process group of this rank's line along an axis."""

    def seed(self) -> Any:
        """The step's random seed, equal on all ranks: a 0-d int64 value on the CPU."""

    def stream(self) -> int:
        """A number of its own for every random operator of the program, equal on all ranks."""

    def shape(self, value: Any) -> tuple[int, ...]:
        """Local shape of a value."""

    def dtype(self, value: Any) -> torch.dtype:
        """Element type of a value."""

    def device(self, value: Any) -> torch.device:
        """Device of a value."""


def all_reduce(emit: Emitter, value: Any, axis: int, reduction: str = "sum") -> Any:
    """Reduce `value` over one mesh axis."""
    pending = emit.call(collectives.all_reduce.default, value, reduction, emit.group(axis))
    return emit.call(collectives.wait_tensor.default, pending)


@runtime_checkable
class EmitterWithShares(Protocol):
    """An emitter in whose program the ranks of one axis hold shares of their own of a dynamic size.

    Attributes:
        shared: the axis.
    """

    shared: SharedAxis

    def share(self, expr: Any) -> int:
        """A number of the program, from an expression in the symbols of the shares."""

    def shape_with_shares(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A local shape with a rank's share in place of a block."""
