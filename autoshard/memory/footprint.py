"""Live-interval accounting: what one device holds, and when it holds the most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np

AllocationKind = Literal[
    "parameter", "gradient", "optimizer", "buffer", "input", "saved", "gathered", "communication", "temporary"
]

KINDS: tuple[AllocationKind, ...] = get_args(AllocationKind)
DescribeMoment = Callable[[int], tuple[str, str, str]]
_LARGEST = 10


@dataclass(frozen=True, slots=True)
class Allocation:
    """Bytes of one device that are in use at the moments `start <= moment < end`.

    Attributes:
        name: of the tensor, for reports.
        bytes: held by one device.
        start: the first moment (position in the order of execution) at which it is held.
        end: the first moment at which it is held no more.
        kind: what it is held for. `"saved"` is made by the forward half and read by the backward half; `"gathered"` is
            a copy of a parameter or input; `"communication"` is what other reshards, and buckets of gradients, are made
            of; `"temporary"` is all else that a half makes.
    """

    name: str
    bytes: int
    start: int
    end: int
    kind: AllocationKind

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


def bytes_by_kind(allocations: Iterable[Allocation], moment: int) -> dict[AllocationKind, int]:
    """Bytes held at one moment by kind, every kind present; their sum is what is held."""
    held: dict[AllocationKind, int] = dict.fromkeys(KINDS, 0)
    for allocation in allocations:
        if allocation.start <= moment < allocation.end:
            held[allocation.kind] += allocation.bytes
    return held


def live_bytes(allocations: Iterable[Allocation], moments: int) -> np.ndarray:
    """Bytes held at each of the moments `0` to `moments - 1`."""
    change = np.zeros(moments + 1)
    for one in allocations:
        change[min(one.start, moments)] += one.bytes
        change[min(one.end, moments)] -= one.bytes
    return np.cumsum(change)[:moments]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """One tensor that a device holds: its name, what it is held for (one of `KINDS`), and its bytes."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one device holds in a step.

    `parameters`, `gradients`, `optimizer` and `buffers` are totals over the step. `activations` is the most held at
    one moment for anything else: inputs, saved activations, gathered copies, buffers of communication and temporaries.
    The `peak` may be below the sum, since not all gradients are there while most activations are.

    Attributes:
        held: bytes at the moment of the peak, by kind (`KINDS`); kinds of which nothing is held are left out.
        phase: `"forward"`, `"backward"` or `"optimizer"`: when the peak is.
        module: path of the module that runs then, `""` for the root.
        operator: what runs then.
        largest: the largest tensors that are held then.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0
    peak: int = 0
    held: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""
    operator: str = ""
    largest: tuple[LiveTensor, ...] = ()

    @staticmethod
    def of(allocations: Sequence[Allocation], place: DescribeMoment | None = None) -> Memory:
        """The account of a step in which these are allocated.

        Args:
            allocations: all of them.
            place: says what runs at a moment: phase, path of the module, operator.
        """

        def total(kind: AllocationKind) -> int:
            return sum(allocation.bytes for allocation in allocations if allocation.kind == kind)

        lasting = ("parameter", "gradient", "optimizer", "buffer")
        most, moment = peak(allocations)
        then = sorted((one for one in allocations if one.start <= moment < one.end), key=lambda one: -one.bytes)
        phase, module, operator = ("", "", "") if place is None else place(moment)
        return Memory(
            parameters=total("parameter"),
            gradients=total("gradient"),
            optimizer=total("optimizer"),
            buffers=total("buffer"),
            activations=peak(one for one in allocations if one.kind not in lasting)[0],
            peak=most,
            held={kind: held for kind, held in bytes_by_kind(then, moment).items() if held},
            phase=phase,
            module=module,
            operator=operator,
            largest=tuple(LiveTensor(one.name, one.kind, one.bytes) for one in then[:_LARGEST] if one.bytes),
        )

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Memory:
        """The account that `dataclasses.asdict` made data of."""
        return Memory(**{**data, "largest": tuple(LiveTensor(**one) for one in data["largest"])})
