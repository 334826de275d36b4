"""The assignment problem of stages: constraints, and the costs of an assignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.pipeline.graph.stage_graph import StageGraph, StageValue

# Part of a limit by which sums may exceed it: solvers keep rows within such tolerances.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device of one stage.

    Attributes:
        bandwidth: bytes per second of the link to the next stage; that of the last stage is not used.
        speed: relative to the device that the graph was priced for.
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
    """A stage for every node of a graph, and the recomputed values: pairs of a value's position and a stage."""

    stage: tuple[int, ...]
    recomputed: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class AssignmentTotals:
    """Totals of an assignment, by stage, or by boundary, the first between stages 0 and 1.

    Attributes:
        seconds: forward, backward and recomputation of one microbatch, on the stage's device.
        again: of these, seconds of recomputation.
        at_rest: bytes of parameters, gradients, optimizer state and buffers.
        saved: bytes that one microbatch keeps from forward to backward: saved there, or received.
        forward_bytes, backward_bytes: over every boundary, per microbatch.
        recomputed: pairs of a value's position and a stage that recomputes it, where it is needed.
        objective: seconds of values and gradients that cross boundaries, and of recomputation.
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
    """The choice of a stage for every node.

    Attributes:
        graph: nodes and values.
        devices: of every stage.
        in_flight: for every stage, the microbatches whose saved tensors it holds at once.
        tolerance: allowed deviation of a stage from its share of the work, as a part of the share.
        less: True if less than a share is no imbalance.
    """

    graph: StageGraph
    devices: tuple[StageDevice, ...]
    in_flight: tuple[int, ...]
    tolerance: float
    less: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.devices)

    @property
    def share(self) -> float:
        """Seconds of a stage of speed 1 in perfect balance: work in proportion to speed (Whale 3.3.2)."""
        return self.graph.seconds / sum(device.speed for device in self.devices)

    def capacity(self, stage: int) -> float:
        """Return the most seconds of work of a stage, on a device of speed 1."""
        return (1 + self.tolerance) * self.share * self.devices[stage].speed

    def transfer(self, value: StageValue, stage: int) -> float:
        """Return the seconds in which a value and its gradient cross the boundary before a stage."""
        return value.traffic / self.devices[stage - 1].bandwidth

    def recompute(self, value: StageValue, stage: int) -> float:
        """Return the seconds of recomputing a value on a stage; infinite where that is not possible."""
        seconds = value.recompute_seconds
        return math.inf if seconds is None else seconds / self.devices[stage].speed

    def cheaper_recomputations(self) -> frozenset[tuple[int, int]]:
        """Return the values, by position, and stages, where recomputing a value is cheaper than receiving it."""
        return frozenset(
            (place, stage)
            for place, value in enumerate(self.graph.values)
            for stage in range(1, self.stages)
            if self.recompute(value, stage) < self.transfer(value, stage)
        )

    def totals(self, assignment: Assignment) -> AssignmentTotals:
        """Return the totals of an assignment."""
        count = self.stages
        totals = AssignmentTotals(
            [0.0] * count, [0.0] * count, [0] * count, [0] * count, [0] * (count - 1), [0] * (count - 1)
        )
        kept: list[set[str]] = [set() for _ in range(count)]
        for node, stage in zip(self.graph.nodes, assignment.stage, strict=True):
            totals.seconds[stage] += node.seconds / self.devices[stage].speed
            totals.saved[stage] += node.saved_bytes
            kept[stage].update(node.at_rest)
        # Once per stage for each parameter, however many nodes read it there.
        for stage, names in enumerate(kept):
            totals.at_rest[stage] = sum(self.graph.at_rest[name] for name in names)
        for place, value in enumerate(self.graph.values):
            for stage, again in self.route(assignment, place):
                if again:
                    seconds = self.recompute(value, stage)
                    totals.recomputed.add((place, stage))
                    totals.seconds[stage] += seconds
                    totals.again[stage] += seconds
                    totals.objective += seconds
                else:
                    totals.objective += self.transfer(value, stage)
                    totals.forward_bytes[stage - 1] += value.bytes
                    totals.backward_bytes[stage - 1] += value.gradient_bytes
                    # What a stage receives stays in its buffer until backward.
                    totals.saved[stage] += value.bytes
        return totals

    def route(self, assignment: Assignment, place: int) -> Iterator[tuple[int, bool]]:
        """Yield the stages behind its own that a value reaches, and True where it is recomputed, not received."""
        value = self.graph.values[place]
        source = assignment.stage[value.source]
        readers = {assignment.stage[user] for user in value.users}
        if value.output:
            # The model's result is put together on the last stage.
            readers.add(self.stages - 1)
        needed = False
        # Backwards from the last reader: a stage has the value if it reads it or hands it on.
        for stage in range(max(readers, default=source), source, -1):
            needed = needed or stage in readers
            if needed:
                again = (place, stage) in assignment.recomputed
                yield stage, again
                needed = not again

    def memory(self, totals: AssignmentTotals) -> list[int]:
        """Return the bytes on every stage: at rest, and saved for the microbatches in flight."""
        return [
            rest + count * saved
            for rest, saved, count in zip(totals.at_rest, totals.saved, self.in_flight, strict=True)
        ]

    def imbalance(self, totals: AssignmentTotals) -> float:
        """Return the largest deviation of a stage from its share, as a part of the share."""
        if not self.share:
            return 0.0
        over = max(totals.seconds) / self.share - 1
        if self.less:
            return over
        # Recomputation occupies a stage, but takes no work from the others: it counts for more than a share only.
        work = zip(totals.seconds, totals.again, strict=True)
        return max(over, *(1 - (seconds - again) / self.share for seconds, again in work))

    def fits_memory(self, totals: AssignmentTotals) -> bool:
        """Return True if the totals keep memory."""
        memory = zip(self.memory(totals), self.devices, strict=True)
        return all(held <= device.memory * (1 + _ROUNDING) for held, device in memory)

    def is_feasible(self, totals: AssignmentTotals) -> bool:
        """Return True if the totals keep balance and memory."""
        return self.imbalance(totals) <= self.tolerance + _ROUNDING and self.fits_memory(totals)


def as_problem(
    graph: StageGraph, devices: Sequence[StageDevice], in_flight: Sequence[int], tolerance: float
) -> StageProblem:
    """Check these arguments and make a problem of them.

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
