"""What no schedule of some stages is below: seconds of a step, and bytes of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes


def least_seconds(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int, halves: bool) -> float:
    """Seconds that a step takes at least.

    Nothing runs on a rank before the first microbatch has come to its first stage. Where backward is never halved, the
    last that it runs is a backward of that stage, whose gradients go all the way back and are reduced. Nor is a step
    shorter than the way of one microbatch.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
        halves: whether backward may run in halves.
    """
    sends = [0.0 if here == there else 1.0 for here, there in pairwise(placement)]
    backward = [cost.input_backward_seconds if halves else cost.backward_seconds for cost in costs]
    head, tail = [0.0], [0.0]  # until a microbatch has come to a stage; until its gradients have gone from there
    for stage, send in enumerate(sends):
        head.append(head[-1] + costs[stage].forward_seconds + send * costs[stage].forward_send_seconds)
        tail.append(tail[-1] + backward[stage] + send * costs[stage + 1].backward_send_seconds)
    work, applied = [0.0] * (max(placement) + 1), [0.0] * (max(placement) + 1)
    for cost, rank in zip(costs, placement, strict=True):
        work[rank] += microbatches * (cost.forward_seconds + cost.backward_seconds)
        applied[rank] += cost.application_seconds
    busiest = 0.0
    for rank, seconds in enumerate(work):
        first = placement.index(rank)
        reduced = 0.0 if halves else costs[first].reduction_seconds
        left = max(reduced + applied[rank], 0.0 if halves else tail[first])
        busiest = max(busiest, head[first] + seconds + left)
    way = head[-1] + costs[-1].forward_seconds + backward[-1] + tail[-1]
    way += costs[0].weight_backward_seconds if halves else 0.0
    return max(busiest, way + costs[0].reduction_seconds + applied[placement[0]])


def least_bytes(costs: Sequence[StageCosts], placement: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Bytes that every rank holds at least.

    A microbatch has gone forward through all its stages before it comes back; in the end every stage is updated.

    Args:
        costs: one per stage.
        placement: the rank of every stage.
        microbatches: of one step.
    """
    rest = rest_bytes(placement, microbatches, costs)
    least = list(rest)
    last = {rank: stage for stage, rank in enumerate(placement)}
    for stage, rank in enumerate(placement):
        least[rank] += costs[stage].saved_bytes + (costs[stage].working_bytes if last[rank] == stage else 0)
    for stage, rank in enumerate(placement):
        least[rank] = max(least[rank], rest[rank] + costs[stage].application_bytes)
    return tuple(least)
