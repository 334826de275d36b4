"""Lower bounds of all schedules of some stages: seconds of a step, and bytes of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes


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
