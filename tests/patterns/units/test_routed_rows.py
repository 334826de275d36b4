"""Rows sent to the ranks of their groups, and what is done to them there, against one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture import capture
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.strategy import describe, offered_factors
from autoshard.specs.axes import MeshShape
from tests.float64 import Float64Mode
from tests.models.routed import ROUTINGS, SortedExperts, sorted_experts
from tests.patterns.units.unit_models import plan_of, worst_error
from tests.random_plans import random_plan
from tests.training import TOLERANCE

BY_EXPERT = {"up": Shard(0), "bias": Shard(0), "down": Shard(0)}


def build(routing: str, **options: Any) -> Callable[[], tuple[nn.Module, dict[str, Any]]]:
    return functools.partial(sorted_experts, dtype=torch.float64, routing=routing, **options)


def strategies(mesh: dict[str, int], hints: dict[str, Any]) -> dict[str, set[str]]:
    """By operator, how the plan splits what routes and what lies between."""
    found: dict[str, set[str]] = {}
    for choice in plan_of(build("random"), mesh, hints=hints).choices:
        if choice.operator.startswith(("autoshard.", "transformers.")):
            found.setdefault(choice.operator, set()).add(choice.strategy)
    return found


@pytest.mark.parametrize(("routing", "size"), [*((routing, 4) for routing in ROUTINGS), ("random", 2), ("random", 3)])
def test_experts_by_rank(routing: str, size: int) -> None:
    assert worst_error(build(routing), {"ep": size}, hints=BY_EXPERT) < TOLERANCE


@pytest.mark.parametrize(("routing", "axis"), [("random", 0), ("one expert", 1)])
def test_experts_on_one_axis_and_tokens_on_both(routing: str, axis: int) -> None:
    placements = (Shard(0), Replicate()) if axis == 0 else (Replicate(), Shard(0))
    hints = dict.fromkeys(BY_EXPERT, placements)
    assert worst_error(build(routing), {"x": 2, "y": 2}, hints=hints) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "placements", "strategy"),
    [
        ({"ep": 4}, Shard(0), "group on ep"),
        ({"ep": 2, "dp": 2}, (Shard(0), Replicate()), "group on ep, source on dp"),
        ({"dp": 2, "ep": 2}, (Replicate(), Shard(0)), "source on dp, group on ep"),
    ],
)
def test_how_rows_are_split(mesh: dict[str, int], placements: Any, strategy: str) -> None:
    """Those were the strategies whose numbers the tests above have compared."""
    found = strategies(mesh, dict.fromkeys(BY_EXPERT, placements))
    assert set(found) >= {"autoshard.group", "autoshard.dispatch", "autoshard.combine"}
    assert all(each == {strategy} for each in found.values()), found


def test_tokens_alone() -> None:
    """Five ranks can not share six experts: each computes all of them, on its own tokens."""
    small = build("random", tokens=20, experts=6)
    plan = plan_of(small, {"dp": 5})
    found = {choice.strategy for choice in plan.choices if choice.operator.startswith(("autoshard.", "transformers."))}
    assert found == {"source on dp"}
    assert {record.kind for record in plan.collectives if record.phase == "forward"} <= {"all_gather"}  # of the output
    assert worst_error(small, {"dp": 5}) < TOLERANCE


@pytest.mark.parametrize(
    ("seed", "split"), [(5, "group on x, source on y"), (7, "partial sum passes on x, group on y")]
)
def test_random_plans(seed: int, split: str) -> None:
    """Whatever else is split how, and whatever waits for its reduction meanwhile."""
    mesh = MeshShape.of({"x": 2, "y": 3})
    module, inputs = build("random")()
    with Float64Mode():
        graph = capture(module, (), inputs)
    plan = random_plan(graph, mesh, seed, uneven=0.2)
    rules, choices = GraphRules(graph, mesh).rules, plan.decisions["choices"]
    (back,) = (node for node in rules if node.name == "combine")
    assert describe(rules[back], tuple(choices[back.name]), mesh) == split
    assert worst_error(build("random"), {"x": 2, "y": 3}, 1, plan=plan) < TOLERANCE


class Counting(SortedExperts):
    """Experts that also cumulate over the rows of all of them, which ranks with some of the rows can not."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.sort(chosen.reshape(-1), stable=True)
        ends = torch.histc(order.values.float(), self.experts, 0, self.experts - 1).cumsum(0, dtype=torch.int32)
        rows = self.first(x)[order.indices // chosen.shape[1]].cumsum(0)
        rows = torch.ops.transformers.grouped_mm_fallback(rows, self.up.transpose(1, 2), ends)
        return rows[torch.argsort(order.indices)]


def counting() -> tuple[nn.Module, dict[str, Any]]:
    _, inputs = sorted_experts(dtype=torch.float64)
    torch.manual_seed(0)
    return Counting(6, 4, 12).double(), inputs


def test_a_route_is_closed_by_an_operator_that_needs_all_rows() -> None:
    module, inputs = counting()
    rules = GraphRules(capture(module, (), inputs), MeshShape.of({"ep": 2}))
    routed = [node for node in rules.operators if "autoshard" in str(node.target)]
    assert len(routed) == 5
    for node in rules.operators:
        factors = offered_factors(rules.rules[node])
        assert not any(factor.shardable and factor.routed for factor in factors), node
    assert worst_error(counting, {"ep": 2}) < TOLERANCE
