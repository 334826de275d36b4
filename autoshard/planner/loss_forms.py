"""The plan of a call whose loss may have whole logits, or be computed in pieces.

Pieces (`operators/large_losses/loss_in_pieces.py`) compute logits twice, so whole logits are faster if memory
suffices, and are planned first. A plan with pieces is made if no whole logits fit, or if a limit slows these down by
more than the time to compute logits twice.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from autoshard.errors import BudgetError
from autoshard.planner.budget_search import ShortfallError
from autoshard.planner.planning import CapturedCall
from autoshard.planner.shares import plan_shares
from autoshard.plans.sharding_plan import ShardingPlan

_LEAST_TIME = 0.25
"""Least fraction of the time limit for the second search, however long the first one took."""


def plan_losses(call: CapturedCall) -> ShardingPlan:
    """Return the faster plan of a call: with whole logits, or with its losses in pieces.

    Without a memory limit, the plan that fits into a device.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    if call.capture_other is None or call.is_in_pieces:
        return plan_shares(call)
    start, limit = time.monotonic(), call.target.settings.time_limit
    try:
        # If pieces do not fit, either, the error's remedies are those of pieces, which need less.
        whole = plan_shares(replace(call, is_explained=False))
    except BudgetError as whole_error:
        try:
            return plan_shares(_other_form(call, start + limit))
        except BudgetError as error:
            if (whole_error.peak or math.inf) >= (error.peak or math.inf):
                raise
            raise (whole_error.with_remedies() if isinstance(whole_error, ShortfallError) else whole_error) from None
    room = call.target.settings.memory_limit or call.target.cluster.device.memory
    fits = whole.memory.peak <= room
    if call.was_interrupted or (fits and whole.step_seconds <= call.unlimited_seconds + _seconds_twice(call)):
        return whole
    try:
        pieces = plan_shares(replace(_other_form(call, start + limit), is_explained=False))
    except BudgetError:
        return whole
    return min((whole, pieces), key=lambda plan: (max(plan.memory.peak, room), plan.step_seconds))


def _other_form(call: CapturedCall, deadline: float) -> CapturedCall:
    """Return the call in its other form, planned in the remaining time, or at least a fraction of the limit."""
    call.other_form.deadline = max(deadline, time.monotonic() + _LEAST_TIME * call.target.settings.time_limit)
    return call.other_form


def _seconds_twice(call: CapturedCall) -> float:
    """Return the least seconds for every device to recompute its part of the logits."""
    device = call.target.cluster.device
    return sum(flops / device.peak(dtype) for dtype, flops in call.graph.twice_in_pieces.items()) / call.mesh.size
