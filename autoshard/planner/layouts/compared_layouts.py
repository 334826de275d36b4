"""A plan, and the planner of layouts that are compared with it, on one captured graph and at the same prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.bound_call import BoundCall
from autoshard.errors import BudgetError
from autoshard.options import Options
from autoshard.options.target import Target
from autoshard.planner.layouts.layout_planner import LayoutPlanner
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planning import CapturedCall, run_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape


def plan_for_comparison(
    module: nn.Module,
    mesh: MeshShape,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    device_type: str | None,
) -> tuple[ShardingPlan, LayoutPlanner]:
    """Return the plan of a call of a module, and a planner of other layouts of the call.

    Args:
        module, mesh: what is planned, without a pipeline.
        args, kwargs: of a call, tensors of global shape.
        options: their memory limit is by default what a device has; it is a limit of the plan if any plan fits it.
        device_type: of the devices; None if there are none yet.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    target = Target.of(options, device_type)
    limit = target.settings.memory_limit or target.cluster.device.memory
    target = replace(target, settings=replace(target.settings, memory_limit=limit))
    planner = ModulePlanner(module, mesh, target)
    bound = BoundCall.of(module, args, kwargs, torch.is_grad_enabled())
    call = planner.capture(bound, logits_room=planner.logits_room, by_layers=True)
    plan = _plan(planner, call)
    return plan, LayoutPlanner(call.form_of(plan), target)


def _plan(planner: ModulePlanner, call: CapturedCall) -> ShardingPlan:
    """Return the plan within the memory limit; if none fits, the one without a limit."""
    try:
        return planner.plan(call)
    except BudgetError:
        target = replace(planner.target, settings=replace(planner.target.settings, memory_limit=None))
        return run_planner(call.planner_of(target), call.seconds, target)
