"""What the backward half has from where adds up to what the account and the program of the plan hold."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from autoshard.capture.recomputation import recomputable, recompute_layers
from autoshard.memory.footprint import SOURCES
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.rerun_context import RerunContext
from autoshard.plans.sharding_plan import ShardingPlan
from tests.planner.steps import every_parameter, joint_graph, planner_of, regather_all


def _totals(plan: ShardingPlan) -> Counter[str]:
    total = Counter[str]()
    for sizes in plan.memory.sources.values():
        assert sizes.keys() <= {*SOURCES}
        total.update(sizes)
    return total


def _held_between(plan: ShardingPlan, kind: str) -> int:
    """Return the bytes of a kind that the replay of the step holds when the backward half begins."""
    border = sum(choice.phase == "forward" for choice in plan.choices)
    held = plan.step_replay.bytes_by_kind(len(plan.choices) + 1)
    return held[kind][border] if kind in held else 0


@pytest.mark.parametrize("strength", [0.0, 3.0, 100.0])
def test_what_is_kept_is_what_the_step_holds_between_its_halves(strength: float) -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 4})
    context = RerunContext(planner, copy_price=1.0)
    free = planner.solve(planner.constraints)
    moments = len(context.rules.operators) + 1
    prices = np.full(moments, strength * free.cost / free.memory.peak / moments)
    lean = context.solve(context.constraints, prices=prices)
    plan = lean.estimate.context.describe(lean)
    total = _totals(plan)
    assert total["saved"] == _held_between(plan, "saved") > 0
    # Copies of the first operator of the backward half may be there, too.
    assert 0 < total["gathered"] <= _held_between(plan, "gathered")
    assert total["host"] == plan.memory.host
    assert (total["host"] > 0) == bool(plan.offloaded) == (strength > 0)
    assert (total["run again"] > 0) == (strength == 3.0)


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "resnet18"])
def test_what_is_made_again_is_no_more_kept(name: str) -> None:
    graph = joint_graph(name)
    layers = [layer.name for layer in recomputable(graph)]
    whole = _totals(planner_of(graph, {"x": 1}).plan())
    again = planner_of(recompute_layers(graph, layers), {"x": 1}).plan()
    assert _totals(again)["run again"] == whole["saved"] - _totals(again)["saved"] > 0
    assert whole["run again"] == 0
    made = {path for path, sizes in again.memory.sources.items() if "run again" in sizes}
    assert all(any(path.startswith(layer) for layer in layers) for path in made)


def test_parameters_in_shards_are_gathered_again_whole() -> None:
    graph = joint_graph("gpt")
    planner = planner_of(graph, {"x": 4}, Constraints(forced=every_parameter(graph)))
    plan = regather_all(planner, planner.plan())
    whole = Counter[str]()
    for name, how in plan.gathered.items():
        if how == "again":
            whole[name.rpartition(".")[0]] += 4 * math.prod(plan.shapes[name])
    assert whole
    again = {path: plan.memory.sources[path]["gathered again"] for path in whole}
    assert again == whole
