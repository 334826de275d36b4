"""Costs of a stage: seconds and bytes, independent of the model.

Lower bounds of all schedules of some stages: seconds of a step, and bytes of every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of one stage on its devices; times are of one microbatch, bytes those of one device.

    Attributes:
        forward_seconds: of the forward pass.
        input_backward_seconds: of the half of backward that makes gradients of the stage's inputs.
        weight_backward_seconds: of the half that makes gradients of its parameters and adds them to those of the
            earlier microbatches. A whole backward takes both.
        forward_bytes: sent to the next stage.
        forward_send_seconds: of sending them.
        backward_bytes: of gradients sent to the stage before.
        backward_send_seconds: of sending them.
        rest_bytes: held during the whole step: parameters, gradients and optimizer state.
        saved_bytes: kept of one microbatch from its forward to its backward, without the received tensors.
        weight_saved_bytes: bytes that the half of backward for weights needs, including those that the half for inputs
            adds. They are kept until the half for weights has run.
        working_bytes: held in addition while a computation runs.
        reduction_seconds: of reducing the stage's gradients over data-parallel ranks, once per step, without the part
            that its last backward hides.
        application_seconds: of the optimizer's update, once per step.
        application_bytes: held in addition to `rest_bytes` during that update.
    """

    forward_seconds: float
    input_backward_seconds: float
    weight_backward_seconds: float
    forward_bytes: int = 0
    forward_send_seconds: float = 0.0
    backward_bytes: int = 0
    backward_send_seconds: float = 0.0
    rest_bytes: int = 0
    saved_bytes: int = 0
    weight_saved_bytes: int = 0
    working_bytes: int = 0
    reduction_seconds: float = 0.0
    application_seconds: float = 0.0
    application_bytes: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            amount = getattr(self, field.name)
            if not 0 <= amount < float("inf"):
                raise PipelineError(f"{field.name} of a stage is {amount}: it has to be a number from 0 up.")

    @property
    def backward_seconds(self) -> float:
        """Seconds of a whole backward."""
        return self.input_backward_seconds + self.weight_backward_seconds

    def seconds(self, kind: ActionKind) -> float:
        """Return the seconds of a computation of this kind."""
        if kind == ActionKind.FORWARD:
            return self.forward_seconds
        if kind == ActionKind.INPUT_BACKWARD:
            return self.input_backward_seconds
        return self.weight_backward_seconds if kind == ActionKind.WEIGHT_BACKWARD else self.backward_seconds

    def memory_change(self, kind: ActionKind) -> int:
        """Return the bytes that a computation of this kind adds to (or, negative, takes from) the kept memory."""
        if kind == ActionKind.FORWARD:
            return self.saved_bytes
        if kind == ActionKind.INPUT_BACKWARD:
            return self.weight_saved_bytes - self.saved_bytes
        return -self.weight_saved_bytes if kind == ActionKind.WEIGHT_BACKWARD else -self.saved_bytes


def rest_bytes(placement: Sequence[int], microbatches: int, costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """Return the bytes that every rank holds during the whole step: those of its stages and its receive buffers.

    Args:
        placement: the rank of every stage.
        microbatches: of one step.
        costs: one per stage.
    """
    rest = [0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        # Torch allocates buffers before the first step: one per microbatch for what a stage receives forward, and one
        # for the gradients that it receives.
        received = costs[stage - 1].forward_bytes if stage > 0 else 0
        received += costs[stage + 1].backward_bytes if stage < len(placement) - 1 else 0
        rest[rank] += costs[stage].rest_bytes + microbatches * received
    return tuple(rest)


def least_seconds(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, halves: bool) -> float:
    """Return a lower bound of the seconds of a step.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
        halves: whether backward may run in halves.
    """
    sends = [0.0 if here == there else 1.0 for here, there in pairwise(placement)]
    backward = [cost.input_backward_seconds if halves else cost.backward_seconds for cost in costs]
    # Seconds until a microbatch arrives at a stage, and from a stage until its gradients arrive at the first one.
    head, tail = [0.0], [0.0]
    for stage, send in enumerate(sends):
        head.append(head[-1] + costs[stage].forward_seconds + send * costs[stage].forward_send_seconds)
        tail.append(tail[-1] + backward[stage] + send * costs[stage + 1].backward_send_seconds)
    work, applied = [0.0] * (max(placement) + 1), [0.0] * (max(placement) + 1)
    for cost, rank in zip(costs, placement, strict=True):
        work[rank] += microbatches * (cost.forward_seconds + cost.backward_seconds)
        applied[rank] += cost.application_seconds
    busiest = 0.0
    for rank, seconds in enumerate(work):
        # A rank idles until the first microbatch arrives at its first stage. Where backward is never halved, its last
        # computation is a backward of that stage, whose gradients still go all the way back and are reduced.
        first = placement.index(rank)
        reduced = 0.0 if halves else costs[first].reduction_seconds
        left = max(reduced + applied[rank], 0.0 if halves else tail[first])
        busiest = max(busiest, head[first] + seconds + left)
    # A step is no shorter than the way of one microbatch to the last stage and back.
    way = head[-1] + costs[-1].forward_seconds + backward[-1] + tail[-1]
    way += costs[0].weight_backward_seconds if halves else 0.0
    return max(busiest, way + costs[0].reduction_seconds + applied[placement[0]])


def least_bytes(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Return a lower bound of the bytes of every rank.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
    """
    rest = rest_bytes(placement, microbatches, costs)
    least = list(rest)
    # A microbatch passes all stages of a rank forward before it comes back: the rank's last stage computes while all of
    # them hold their saved tensors.
    last = {rank: stage for stage, rank in enumerate(placement)}
    for stage, rank in enumerate(placement):
        least[rank] += costs[stage].saved_bytes + (costs[stage].working_bytes if last[rank] == stage else 0)
    for stage, rank in enumerate(placement):  # the optimizer's update
        least[rank] = max(least[rank], rest[rank] + costs[stage].application_bytes)
    return tuple(least)
