"""Live-interval accounting of the memory of one device, and its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

AllocationKind = Literal[
    "parameter", "gradient", "optimizer", "buffer", "input", "output", "saved", "gathered", "communication", "temporary"
]

KINDS: tuple[AllocationKind, ...] = get_args(AllocationKind)
AT_REST: frozenset[AllocationKind] = frozenset({"parameter", "optimizer", "buffer", "input"})
"""Kinds of inputs of the step, which are held throughout."""
DescribeMoment = Callable[[int], tuple[str, str, str]]
"""The phase, the path of the module, and the operator that run at a moment."""

Source = Literal["saved", "gathered", "gathered again", "run again", "host"]
"""How the backward half gets a value of the forward half: kept on the device, as a `"saved"` tensor or a `"gathered"`
copy; recomputed, by a collective (`"gathered again"`) or by operators (`"run again"`); or copied from the host.
"""

SOURCES: tuple[Source, ...] = get_args(Source)

_LARGEST = 10  # tensors that a report lists


class Allocation(NamedTuple):
    """Bytes of one device that are in use at the moments `start <= moment < end`.

    Attributes:
        name: of the tensor, for reports.
        bytes: held by one device.
        start: the first moment (position in the order of execution) at which it is held.
        end: the first moment at which it is no longer held.
        kind: its purpose. An `"output"` is what `forward` returns. A `"saved"` tensor is made by the forward half and
            read by the backward half, `"gathered"` is a copy of a parameter or input, `"communication"` is a buffer of
            another reshard or of a bucket of gradients, `"temporary"` is any other intermediate result.
        module: path of the module that it belongs to, `""` for the root.
    """

    name: str
    bytes: int
    start: int
    end: int
    kind: AllocationKind
    module: str = ""


def peak(allocations: Iterable[Allocation]) -> tuple[int, int]:
    """Return the peak in bytes and its first moment; (0, 0) where nothing is held."""
    changes: dict[int, int] = {}
    for _, size, start, end, *_ in allocations:
        if size and start < end:
            changes[start] = changes.get(start, 0) + size
            changes[end] = changes.get(end, 0) - size
    if not changes:
        return 0, 0
    moments = sorted(changes)
    held = list(accumulate(changes[moment] for moment in moments))  # from each moment to the next
    most = max(held)
    return most, moments[held.index(most)]


def saved_at_peak(allocations: Sequence[Allocation]) -> dict[int, int]:
    """Return the bytes of saved tensors at the peak, by the moments at which they are made."""
    moment, made = peak(allocations)[1], dict[int, int]()
    for allocation in allocations:
        if allocation.kind == "saved" and allocation.start <= moment < allocation.end:
            made[allocation.start] = made.get(allocation.start, 0) + allocation.bytes
    return made


def kept_by_module(allocations: Iterable[Allocation], border: int, under_way: int = 1) -> dict[str, dict[Source, int]]:
    """Return the bytes that a run of a step keeps between its halves, by path of module and `"saved"` or `"gathered"`.

    Args:
        allocations: of the step.
        border: the first moment of the backward half.
        under_way: concurrent runs (microbatches): allocations from before the border count the bytes of all of them.
    """
    kept: dict[str, dict[Source, int]] = {}
    for _, size, start, end, kind, module in allocations:
        # A tensor saved by the last operator of the forward half may start at the border.
        if size and end > border and ((kind == "saved" and start <= border) or (kind == "gathered" and start < border)):
            of_module = kept.setdefault(module, {})
            of_module[kind] = of_module.get(kind, 0) + size * (under_way if start == border else 1)
    return {path: {kind: size // under_way for kind, size in of_module.items()} for path, of_module in kept.items()}


def bytes_by_kind(allocations: Iterable[Allocation], moment: int) -> dict[AllocationKind, int]:
    """Return the bytes held at one moment by kind, with every kind present."""
    held: dict[AllocationKind, int] = dict.fromkeys(KINDS, 0)
    for allocation in allocations:
        if allocation.start <= moment < allocation.end:
            held[allocation.kind] += allocation.bytes
    return held


def live_bytes(allocations: Iterable[Allocation], moments: int) -> np.ndarray:
    """Return the bytes held at each of the moments `0` to `moments - 1`."""
    change = [0] * (moments + 1)  # one entry more, for what is held to the end
    for _, size, start, end, *_ in allocations:
        change[min(start, moments)] += size
        change[min(end, moments)] -= size
    return np.cumsum(np.array(change, dtype=np.float64))[:moments]


def changes_by_kind(allocations: Iterable[Allocation]) -> dict[AllocationKind, np.ndarray]:
    """Return, for every kind held, the moments at which its bytes change, and its bytes from each of them on.

    Returns:
        Kind -> an array of shape `(changes, 2)`: moment and bytes, in order.
    """
    changes: dict[AllocationKind, dict[int, int]] = {}
    for _, size, start, end, kind, _ in allocations:
        if size and start < end:
            change = changes.setdefault(kind, {})
            change[start] = change.get(start, 0) + size
            change[end] = change.get(end, 0) - size
    held = {}
    for kind in KINDS:
        moments = sorted(moment for moment, change in changes.get(kind, {}).items() if change)
        if moments:
            amounts = accumulate(changes[kind][moment] for moment in moments)
            held[kind] = np.array(list(zip(moments, amounts, strict=True)), dtype=np.int64)
    return held


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that a device holds: its name, its kind (one of `KINDS`), and its bytes."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors of equal layers that the forward half of a step saves for the backward half.

    Attributes:
        module: path of the modules, with `*` for layer indices.
        operator: the operator that makes the tensors.
        line: the line of the model that calls it, such as `model.py:12 (y = x + 1)`; empty if it is not known.
        count: the number of modules.
        bytes: held by one device for each of them.
    """

    module: str
    operator: str
    line: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one device holds in a step.

    `parameters`, `gradients`, `optimizer` and `buffers` are totals over the step. `activations` is the peak of all
    other kinds: inputs, saved activations, gathered copies, communication buffers and temporaries. `peak` may be below
    the sum of these, since few gradients exist while most activations do.

    Attributes:
        held: bytes at the moment of the peak, by kind (`KINDS`), without kinds of 0 bytes.
        phase: the phase of the peak, `"forward"`, `"backward"` or `"optimizer"`.
        module: path of the module that runs at the peak, `""` for the root.
        operator: the operator that runs at the peak.
        largest: the largest tensors that are held at the peak.
        modules: path of a module -> its bytes at the moment of the peak, by kind.
        saved: the saved tensors at the moment of the peak, by the operators that make them.
        host: bytes on the host, not included in the others: tensors between the halves of the step, and state of the
            optimizer.
        host_optimizer: the bytes of `host` for the optimizer: its state, and copies of gradients and parameters.
        sources: path of a module -> bytes that the module made in the forward half and the backward half of a run
            reads, by how it gets them (`SOURCES`). `"run again"` counts results that are recomputed instead of kept.
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
    modules: dict[str, dict[str, int]] = field(default_factory=dict)
    saved: tuple[SavedTensors, ...] = ()
    host: int = 0
    host_optimizer: int = 0
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    @staticmethod
    def of(allocations: Sequence[Allocation], place: DescribeMoment | None = None) -> Memory:
        """Return the account of a step with these allocations; `place` describes the moment of the peak."""
        totals = dict.fromkeys(KINDS, 0)
        for allocation in allocations:
            totals[allocation.kind] += allocation.bytes
        # Kinds that a step reports as totals: some of them exist throughout the step.
        lasting = ("parameter", "gradient", "optimizer", "buffer")
        most, moment = peak(allocations)
        live = [allocation for allocation in allocations if allocation.start <= moment < allocation.end]
        live.sort(key=lambda allocation: -allocation.bytes)  # stable: equal ones stay in the order of the step
        phase, module, operator = ("", "", "") if place is None else place(moment)
        modules: dict[str, dict[str, int]] = {}
        for allocation in live:
            if allocation.bytes:
                of_module = modules.setdefault(allocation.module, {})
                of_module[allocation.kind] = of_module.get(allocation.kind, 0) + allocation.bytes
        return Memory(
            parameters=totals["parameter"],
            gradients=totals["gradient"],
            optimizer=totals["optimizer"],
            buffers=totals["buffer"],
            # The peak of activations may be at another moment than the total peak.
            activations=peak(allocation for allocation in allocations if allocation.kind not in lasting)[0],
            peak=most,
            held={kind: held for kind, held in bytes_by_kind(live, moment).items() if held},
            phase=phase,
            module=module,
            operator=operator,
            largest=tuple(LiveTensor(held.name, held.kind, held.bytes) for held in live[:_LARGEST] if held.bytes),
            modules=modules,
        )

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Memory:
        """Return the account that `dataclasses.asdict` turned into `data`."""
        largest = tuple(LiveTensor(**tensor) for tensor in data["largest"])
        saved = tuple(SavedTensors(**tensors) for tensors in data.get("saved", ()))
        return Memory(**{**data, "largest": largest, "saved": saved})
