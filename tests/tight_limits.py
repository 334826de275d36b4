"""Training under the smallest memory limit that a model can be planned for, against one device, in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.errors import BudgetError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests.option_groups import grouped
from tests.runtime.meshes import simulated_mesh
from tests.training import Errors, build, compare, fast_links, one_device, train

WORK = 2_000
"""Units of work for each plan: the same plans on every machine, however busy it is."""

SECONDS = 600.0
"""For each plan: more than that work takes anywhere."""


@dataclass(frozen=True, slots=True)
class TightRun:
    """A run under a tight limit.

    Attributes:
        model: its name.
        mesh: axis sizes.
        recompute: what was asked for.
        limit: bytes per device that the plan was given.
        unlimited: bytes per device at the peak of the plan without limit and recomputation.
        lying: how many parameters are whole, sharded and used so (never gathered), gathered once, and gathered again.
        recomputed: layers that the backward half runs again.
        errors: largest relative differences to one device.
    """

    model: str
    mesh: tuple[int, ...]
    recompute: str
    limit: int
    unlimited: int
    lying: Counter[str]
    recomputed: int
    errors: Errors


def tight_row(model: str, mesh: tuple[int, ...], recompute: str, steps: int = 1) -> TightRun:
    """Train a model of `tests.models` as planned under the smallest limit that an error names."""
    module, inputs = build(model)
    options: dict[str, Any] = {"cluster": fast_links(), "work_limit": WORK, "time_limit": SECONDS}
    options = grouped(options)
    with simulated_mesh(**{f"axis{place}": size for place, size in enumerate(mesh)}) as device_mesh:
        with Float64Mode():
            unlimited = autoshard.plan(module, device_mesh, (), inputs, recompute="none", **options).memory.peak
            limit = _smallest(module, device_mesh, inputs, recompute=recompute, **options)
            autoshard.parallelize(module, device_mesh, (), inputs, memory_limit=limit, recompute=recompute, **options)
        with default_float64():
            trace = train(module, inputs, steps)
    plan: ShardingPlan = module.sharding_plan
    errors = compare(trace, one_device(model, steps))
    return TightRun(model, mesh, recompute, limit, unlimited, gather_counts(plan), len(plan.recomputed), errors)


def _smallest(module: torch.nn.Module, mesh: DeviceMesh, inputs: dict[str, Any], **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        autoshard.plan(module, mesh, (), inputs, memory_limit=1, **options)
    assert caught.value.peak is not None
    return caught.value.peak


def gather_counts(plan: ShardingPlan) -> Counter[str]:
    """How many parameters lie whole, are used in shards, are gathered once, and are gathered again."""
    return Counter(
        plan.gathered.get(name, "whole" if all(one.is_replicate() for one in placements) else "never")
        for name, placements in plan.placements.items()
    )
