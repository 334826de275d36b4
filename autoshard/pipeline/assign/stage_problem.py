"""The choice of stages as a problem: what it may do, and what an assignment costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.pipeline.graph.stage_graph import StageGraph, StageValue

_ROUNDING = 1e-6
"""By how much of a limit sums may pass it: solvers keep rows within such tolerances."""


@dataclass(frozen=True, slots=True)
class StageDevice:
    """What one stage runs on.

    Attributes:
        bandwidth: bytes per second of the link to the next stage; that of the last stage is not used.
        speed: in times of the device that the graph was priced for.
        memory: bytes.
    """

    bandwidth: float
    speed: float = 1.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        for name in ("bandwidth", "speed", "memory"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} of a stage's device: it must be above 0.")


@dataclass(frozen=True, slots=True)
class Assignment:
    """A stage for every node of a graph, and what is made once more: pairs of a value, by position, and a stage."""

    stage: tuple[int, ...]
    recomputed: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class AssignmentTotals:
    """What an assignment comes to, one entry per stage, or per boundary, the first between stages 0 and 1.

    Attributes:
        seconds: forward, backward and recomputation of one microbatch, on the stage's device.
        again: of these, seconds of recomputation.
        at_rest: bytes of parameters, gradients, optimizer state and buffers.
        saved: bytes kept from forward to backward for one microbatch: saved there, or received.
        forward_bytes, backward_bytes: over every boundary, per microbatch.
        recomputed: values, by position, and the stages where they are made once more, as far as they are needed there.
        objective: seconds in which values and gradients cross boundaries, and in which values are recomputed.
    """

    seconds: list[float]
    again: list[float]
    at_rest: list[int]
    saved: list[int]
    forward_bytes: list[int]
    backward_bytes: list[int]
    recomputed: set[tuple[int, int]] = field(default_factory=set)
    objective: float = 0.0


@dataclass(frozen=True, slots=True)
class StageProblem:
    """Which node runs on which stage.

    Attributes:
        graph: nodes and values.
        devices: of every stage.
        in_flight: for every stage, the microbatches whose saved tensors it holds at once.
        tolerance: by how much of its share of the work a stage may differ from it.
        less: whether a stage may have less than its share by more than that, which counts as no imbalance then.
    """

    graph: StageGraph
    devices: tuple[StageDevice, ...]
    in_flight: tuple[int, ...]
    tolerance: float
    less: bool = False

    @property
    def stages(self) -> int:
        """Their number."""
        return len(self.devices)

    @property
    def share(self) -> float:
        """Seconds of every stage in perfect balance: work in proportion to speed (Whale 3.3.2)."""
        return self.graph.seconds / sum(device.speed for device in self.devices)

    def capacity(self, stage: int) -> float:
        """Seconds of work, on a device of speed 1, that a stage takes at most."""
        return (1 + self.tolerance) * self.share * self.devices[stage].speed

    def transfer(self, value: StageValue, stage: int) -> float:
        """Seconds in which a value, and its gradient, cross the boundary before a stage."""
        return value.traffic / self.devices[stage - 1].bandwidth

    def recompute(self, value: StageValue, stage: int) -> float:
        """Seconds of making a value once more on a stage; infinite where that is not possible."""
        seconds = value.recompute_seconds
        return math.inf if seconds is None else seconds / self.devices[stage].speed

    def totals(self, assignment: Assignment) -> AssignmentTotals:
        """What an assignment comes to."""
        count = self.stages
        account = AssignmentTotals(
            [0.0] * count, [0.0] * count, [0] * count, [0] * count, [0] * (count - 1), [0] * (count - 1)
        )
        kept: list[set[str]] = [set() for _ in range(count)]
        for node, stage in zip(self.graph.nodes, assignment.stage, strict=True):
            account.seconds[stage] += node.seconds / self.devices[stage].speed
            account.saved[stage] += node.saved_bytes
            kept[stage].update(node.at_rest)
        for stage, names in enumerate(kept):
            account.at_rest[stage] = sum(self.graph.at_rest[name] for name in names)
        for place in range(len(self.graph.values)):
            self._add_transfers(account, assignment, place)
        return account

    def route(self, assignment: Assignment, place: int) -> Iterator[tuple[int, bool]]:
        """The stages that a value reaches behind its own, and whether it is made once more there, or received.

        Backwards from its last reader: a stage has the value if it reads it, or hands it on.
        """
        value = self.graph.values[place]
        source = assignment.stage[value.source]
        readers = {assignment.stage[user] for user in value.users}
        if value.output:
            readers.add(self.stages - 1)
        needed = False
        for stage in range(max(readers, default=source), source, -1):
            needed = needed or stage in readers
            if needed:
                again = (place, stage) in assignment.recomputed
                yield stage, again
                needed = not again

    def _add_transfers(self, account: AssignmentTotals, assignment: Assignment, place: int) -> None:
        """Add how a value gets to where it is read."""
        value = self.graph.values[place]
        for stage, again in self.route(assignment, place):
            if again:
                account.recomputed.add((place, stage))
                account.seconds[stage] += self.recompute(value, stage)
                account.again[stage] += self.recompute(value, stage)
                account.objective += self.recompute(value, stage)
                continue
            account.objective += self.transfer(value, stage)
            account.forward_bytes[stage - 1] += value.bytes
            account.backward_bytes[stage - 1] += value.gradient_bytes
            account.saved[stage] += value.bytes

    def memory(self, account: AssignmentTotals) -> list[int]:
        """Bytes on every stage: at rest, and saved for the microbatches in flight."""
        return [
            rest + count * saved
            for rest, saved, count in zip(account.at_rest, account.saved, self.in_flight, strict=True)
        ]

    def imbalance(self, account: AssignmentTotals) -> float:
        """By how much of its share the stage that differs most from it does.

        What a stage recomputes is work that it has, and none that it does for the others: more than a share is counted
        with it, less without.
        """
        if not self.share:
            return 0.0
        over = max(account.seconds) / self.share - 1
        if self.less:
            return over
        work = zip(account.seconds, account.again, strict=True)
        return max(over, *(1 - (seconds - again) / self.share for seconds, again in work))

    def fits_memory(self, account: AssignmentTotals) -> bool:
        """Whether memory is kept."""
        memory = zip(self.memory(account), self.devices, strict=True)
        return all(held <= device.memory * (1 + _ROUNDING) for held, device in memory)

    def is_feasible(self, account: AssignmentTotals) -> bool:
        """Whether balance and memory are kept."""
        return self.imbalance(account) <= self.tolerance + _ROUNDING and self.fits_memory(account)


def as_problem(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], tolerance: float
) -> StageProblem:
    """The problem of these arguments.

    Raises:
        ValueError: they do not fit each other.
    """
    if not devices or len(devices) != len(in_flight):
        raise ValueError(
            f"{len(devices)} devices and {len(in_flight)} numbers of microbatches in flight: one of each for every "
            "stage."
        )
    if min(in_flight) < 1:
        raise ValueError(f"in_flight={list(in_flight)}: every stage has at least one microbatch in flight.")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r}: a share of a stage's work, such as 0.1.")
    return StageProblem(graph, tuple(devices), tuple(in_flight), tolerance)
