"""Schedules and costs that the tests of pipelines share."""

from __future__ import annotations

from typing import Any

from autoshard.pipeline.schedule.actions import SCHEDULES, Action
from autoshard.pipeline.schedule.costs import StageCosts


def sizes(ranks: tuple[int, ...], virtual: tuple[int, ...], microbatches: tuple[int, ...]) -> list[Any]:
    """All schedules that there are of these sizes: name, ranks, microbatches, stages per rank."""
    return [
        (name, p, m, v)
        for name, family in SCHEDULES.items()
        for p in ranks
        for v in virtual
        for m in microbatches
        if family.refusal(p, v, m) is None
    ]


def equal_stages(stages: int, virtual: int = 1, **more: Any) -> list[StageCosts]:
    """Stages that take one second per microbatch and rank forward, and two backward, half of it for the weights."""
    part = {"forward_seconds": 1.0, "input_backward_seconds": 1.0, "weight_backward_seconds": 1.0, **more}
    seconds = {name: amount / virtual if name.endswith("_seconds") else amount for name, amount in part.items()}
    return [StageCosts(**seconds)] * stages


def parse_orders(*orders: str) -> tuple[tuple[Action, ...], ...]:
    """Orders of ranks from what stands in a line each, such as "0F0 0B0"."""
    return tuple(tuple(map(Action.parse, order.split())) for order in orders)
