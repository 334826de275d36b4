"""`StepReplay`: the predicted step of a plan, call by call, and a device's memory over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ComputeSpan(NamedTuple):
    """An interval in which a device computes one operator.

    Attributes:
        moment: the operator, by its index in `ShardingPlan.choices`.
        start, end: seconds from the beginning of the step.
    """

    moment: int
    start: float
    end: float


class CollectiveSpan(NamedTuple):
    """An interval in which one collective runs.

    Attributes:
        moment: the operator that it belongs to, by its index in `ShardingPlan.choices`.
        start, end: seconds from the beginning of the step.
        kind: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"` or `"shift"`.
        axis: the name of the mesh axis of its group.
        bytes: bytes held by one device before it.
    """

    moment: int
    start: float
    end: float
    kind: str
    axis: str
    bytes: int


class HeldBytes(NamedTuple):
    """Bytes that a device holds from a moment on.

    Attributes:
        moment: an operator, by its index in `ShardingPlan.choices`; the moment after the last one is the optimizer's
            update.
        bytes: the most bytes held at once during that moment.
    """

    moment: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StepReplay:
    """The replay of one step on one device: its calls on streams, and its memory.

    With unequal shares, it is the step of equal ones. It does not contain reductions of gradients summed over several
    runs of the step. Seconds are rounded to nanoseconds.

    Attributes:
        compute: in execution order.
        collectives: in the order in which they are issued.
        held: kind of memory (`memory.footprint.KINDS`) -> its bytes whenever they change.
        seconds: from the beginning to the end of the last call, including calls that take no time on the device.
        exposed: seconds in which the device communicates but does not compute.
        hidden: seconds in which it does both. They slow down the compute; `ShardingPlan.step_seconds` includes this,
            but the replay does not.
    """

    compute: tuple[ComputeSpan, ...] = ()
    collectives: tuple[CollectiveSpan, ...] = ()
    held: dict[str, tuple[HeldBytes, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0

    def bytes_by_kind(self, moments: int) -> dict[str, list[int]]:
        """Return, for every kind of memory, the bytes held at each of the moments `0` to `moments - 1`."""
        held = {}
        for kind, changes in self.held.items():
            amounts = [0] * moments
            ends = [change.moment for change in changes[1:]] + [moments]
            for change, end in zip(changes, ends, strict=False):
                amounts[change.moment : end] = [change.bytes] * (end - change.moment)
            held[kind] = amounts
        return held

    def exposed_by_axis(self) -> dict[str, float]:
        """Return, for every mesh axis, the seconds in which the device only communicates; their sum is `exposed`.

        Seconds in which collectives over several axes run are divided equally.
        """
        changes = [(edge, sign, "") for span in self.compute for edge, sign in ((span.start, 1), (span.end, -1))]
        changes += [
            (edge, sign, span.axis) for span in self.collectives for edge, sign in ((span.start, 1), (span.end, -1))
        ]
        seconds: dict[str, float] = {}
        running: dict[str, int] = {}
        before = 0.0
        for moment, sign, axis in sorted(changes):
            axes = [name for name, count in running.items() if count and name]
            for name in axes if not running.get("") else ():
                seconds[name] = seconds.get(name, 0.0) + (moment - before) / len(axes)
            running[axis] = running.get(axis, 0) + sign
            before = moment
        return seconds

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> StepReplay:
        """Return the replay that was converted to `data` by `dataclasses.asdict` and JSON."""
        return StepReplay(
            compute=tuple(ComputeSpan(*span) for span in data["compute"]),
            collectives=tuple(CollectiveSpan(*span) for span in data["collectives"]),
            held={kind: tuple(HeldBytes(*change) for change in changes) for kind, changes in data["held"].items()},
            seconds=data["seconds"],
            exposed=data["exposed"],
            hidden=data["hidden"],
        )
