"""Live-interval accounting: what one device holds, and when it holds the most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

Kind = Literal["parameter", "gradient", "optimizer", "buffer", "activation", "gathered", "temporary"]

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of one device that are in use at the moments `start <= moment < end`.

    Attributes:
        name: of the tensor, for reports.
        bytes: held by one device.
        start: the first moment (position in the order of execution) at which it is held.
        end: the first moment at which it is held no more.
        kind: what it is held for; `"gathered"` is a copy of a sharded tensor, `"temporary"` lives within one operator.
    """

    name: str
    bytes: int
    start: int
    end: int
    kind: Kind

    def __post_init__(self) -> None:
        assert self.bytes >= 0, f"allocation {self.name!r} of {self.bytes} bytes"
        assert self.start <= self.end, f"allocation {self.name!r} ends at {self.end}, before its start {self.start}"
        assert self.kind in KINDS, f"allocation {self.name!r} of unknown kind {self.kind!r}"


def peak(allocations: Iterable[Allocation]) -> tuple[int, int]:
    """The most bytes held at one moment, and the first moment at which they are; (0, 0) where nothing is held."""
    changes: dict[int, int] = {}
    for allocation in allocations:
        if allocation.bytes and allocation.start < allocation.end:
            changes[allocation.start] = changes.get(allocation.start, 0) + allocation.bytes
            changes[allocation.end] = changes.get(allocation.end, 0) - allocation.bytes
    if not changes:
        return 0, 0
    moments = sorted(changes)
    held = list(accumulate(changes[moment] for moment in moments))
    most = max(held)
    return most, moments[held.index(most)]


def components(allocations: Iterable[Allocation], moment: int) -> dict[Kind, int]:
    """Bytes held at one moment by kind, every kind present; their sum is what is held."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for allocation in allocations:
        if allocation.start <= moment < allocation.end:
            held[allocation.kind] += allocation.bytes
    return held


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one device holds in a step.

    `parameters`, `gradients`, `optimizer` and `buffers` are totals over the step. `activations` is the most held at
    one moment for anything else: saved activations, gathered copies and temporaries. The `peak` may be below the sum,
    since not all gradients are there while most activations are.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    peak: int = 0

    @staticmethod
    def of(allocations: Sequence[Allocation]) -> Memory:
        """The account of a step in which these are allocated."""

        def total(kind: Kind) -> int:
            return sum(allocation.bytes for allocation in allocations if allocation.kind == kind)

        passing = [one for one in allocations if one.kind in ("activation", "gathered", "temporary")]
        return Memory(
            parameters=total("parameter"),
            gradients=total("gradient"),
            optimizer=total("optimizer"),
            buffers=total("buffer"),
            activations=peak(passing)[0],
            peak=peak(allocations)[0],
        )
