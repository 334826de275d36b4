"""Plans within memory limits: what ranks hold under them, and how limits compare.

The error of a limit that no plan fits names remedies that were tried, with the peaks that they lead to.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.errors import BudgetError
from autoshard.operators.large_losses import loss_in_pieces
from autoshard.options.target import Settings
from autoshard.planner.budget_search import first_that_fits, largest_names, names_by_size
from autoshard.planner.limit_search import LimitSearch
from autoshard.planner.planner import Planner
from autoshard.planner.planning import plan_with_recompute
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from autoshard.units import parse_bytes
from tests import models
from tests.memory_tracker import first_rank, track_step
from tests.planner.steps import PLENTY, MemoizingContext, joint_graph, planner_of
from tests.training import fast_links

LIMITS = 8


def _measured(
    name: str, options: dict[str, Any], sizes: dict[str, int], cluster: Cluster, plan: autoshard.ShardingPlan
) -> int:
    """Bytes that the first rank holds at most in a step under a plan."""
    module, inputs = models.ALL[name](**options)
    with first_rank(sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=cluster, plan=plan)
        return track_step(module, inputs, torch.optim.AdamW(module.parameters())).peak.bytes


@pytest.mark.parametrize(
    ("name", "options", "sizes", "cluster"),
    [
        ("mlp", {"batch": 120}, {"x": 2}, fast_links()),
        pytest.param("gpt", {"layers": 1}, {"x": 4}, Cluster.preset("a100"), marks=pytest.mark.slow),
    ],
    ids=["mlp", "gpt"],
)
def test_limits_are_kept_by_plans_no_slower_than_the_leanest(
    name: str, options: dict[str, Any], sizes: dict[str, int], cluster: Cluster
) -> None:
    graph = joint_graph(name, **options)
    planner = Planner(graph, MeshShape.of(sizes), cluster, Constraints(), Settings(time_limit=PLENTY))
    known = [planner.solve(planner.constraints)]
    known.append(planner.fastest(known[0]))
    context, fastest = MemoizingContext(planner, False), known[1]
    search = LimitSearch(context, 1000, known)
    assert search.run() is None
    least = search.leanest_met.memory.peak
    measured: dict[str, int] = {}
    rows = []
    for limit in np.linspace(fastest.memory.peak - 1, least, LIMITS).astype(int):
        found = LimitSearch(context, int(limit), known).run()
        assert found is not None
        plan = planner.describe(found)
        decisions = json.dumps(plan.decisions)
        if decisions not in measured:
            measured[decisions] = _measured(name, options, sizes, cluster, plan)
        held = measured[decisions]
        assert plan.memory.peak <= limit
        assert held == pytest.approx(plan.memory.peak, rel=0.01)
        rows.append((plan.step_seconds, held))
    assert len(set(rows)) > 1
    assert max(seconds for seconds, _ in rows) == rows[-1][0]


def _said(recompute: str) -> str:
    planner = planner_of(joint_graph("gpt", layers=2, batch=32), {"x": 2}, memory_limit=1000, recompute=recompute)
    with pytest.raises(BudgetError) as caught:
        plan_with_recompute(planner)
    return str(caught.value)


def test_recomputation_is_named_with_a_limit_that_it_keeps() -> None:
    said = re.search(r'allow recomputation \(recompute="full" needs ([\d.]+ \w+)', _said("none"))
    assert said is not None
    limit = int(1.05 * parse_bytes(said[1]))  # one decimal is said
    graph = joint_graph("gpt", layers=2, batch=32)
    assert plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="full")).memory.peak <= limit
    with pytest.raises(BudgetError):
        plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="none"))


def test_outputs_are_named_with_a_limit_that_they_keep_in_shards() -> None:
    model, inputs = models.gpt(layers=1, batch=32)
    options: dict[str, Any] = {"cluster": fast_links(), "recompute": "none", "search": autoshard.Search(effort="fast")}

    def error_of(limit: int, outputs: Any) -> str:
        with pytest.raises(BudgetError) as caught:
            autoshard.plan(model, {"x": 2}, (), inputs, memory_limit=limit, output_placements=outputs, **options)
        return str(caught.value)

    error = error_of(1000, None)
    assert re.search(r"\(.*\boutputs [\d.]+ [KM]iB.*\)", error)
    said = re.search(r'leave outputs in shards \(output_placements="planned" needs ([\d.]+ \w+)', error)
    assert said is not None
    limit = int(1.05 * parse_bytes(said[1]))  # one decimal is said
    plan = autoshard.plan(model, {"x": 2}, (), inputs, memory_limit=limit, output_placements="planned", **options)
    assert plan.memory.peak <= limit
    assert "leave outputs" not in error_of(1000, "planned")


def test_remedies_that_are_not_enough_say_so_and_come_last() -> None:
    graph = joint_graph("gpt", layers=2, batch=32)

    def error_of(limit: int) -> BudgetError:
        with pytest.raises(BudgetError) as caught:
            plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="none"))
        return caught.value

    error = error_of(1000)
    assert "or less; that is more than the limit)" in str(error)
    assert error.peak is not None
    enough, _, short = str(error_of(round(0.95 * error.peak))).partition(" or less;")
    assert 'recompute="full" needs' in enough
    assert 'recompute="full" needs' not in short


def test_a_host_that_is_full_is_named() -> None:
    graph = joint_graph("gpt", layers=2, batch=32)
    options: dict[str, Any] = {"memory_limit": 1000, "recompute": "none", "offload": "auto"}
    with pytest.raises(BudgetError, match=r"raise host_memory, which is 100\.0 KiB \(with .* a plan needs .*\)"):
        plan_with_recompute(planner_of(graph, {"x": 2}, host_memory=100 * 1024, **options))
    with pytest.raises(BudgetError) as caught:
        plan_with_recompute(planner_of(graph, {"x": 2}, host_memory=2**40, **options))
    assert "host_memory" not in str(caught.value)


def test_moves_are_named_with_a_limit_that_they_keep() -> None:
    graph = joint_graph("hf_gpt2", layers=1)

    def planned(limit: int, **options: Any) -> ShardingPlan:
        return plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=limit, recompute="none", **options))

    with pytest.raises(BudgetError) as caught:
        planned(1000)
    said = re.search(r'offload="auto" needs ([\d.]+ \w+)', str(caught.value))
    assert said is not None
    limit = int(1.01 * parse_bytes(said[1]))  # one decimal is said
    assert planned(limit, offload="auto").memory.peak <= limit


def test_the_host_has_room_for_what_a_remedy_moves() -> None:
    graph = joint_graph("gpt", layers=2, batch=32)
    said = []
    for room in (1000, 2**40):
        with pytest.raises(BudgetError) as caught:
            plan_with_recompute(planner_of(graph, {"x": 2}, memory_limit=1000, recompute="none", host_memory=room))
        said.append(str(caught.value))
    for remedy in ('offload="auto" needs', 'offload_optimizer="all" needs'):
        assert [remedy in text for text in said] == [False, True]


def test_placements_of_an_earlier_call_are_no_hints() -> None:
    graph = joint_graph("mlp")
    pinned = {source.name: (Replicate(),) for source in graph.parameters}
    for placed in (False, True):
        with pytest.raises(BudgetError) as caught:
            plan_with_recompute(planner_of(graph, {"x": 2}, Constraints(pinned, placed), memory_limit=100))
        assert ("drop the hints" in str(caught.value)) == (not placed)


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_what_was_asked_for_already_is_no_way_out(recompute: str) -> None:
    said = _said(recompute)
    assert "add devices (x=4 needs" in said
    assert "recomputation" not in said


def test_more_devices_than_what_is_pinned_can_lie_on_are_not_tried() -> None:
    graph = joint_graph("mlp")
    name = next(item.name for item in graph.inputs if item.kind == "parameter" and item.node.meta["val"].shape[0] == 24)
    planner = planner_of(graph, {"x": 4, "y": 2}, Constraints(pinned={name: (Shard(0), Shard(0))}), memory_limit=1000)
    with pytest.raises(BudgetError, match="add devices, or"):
        plan_with_recompute(planner)


class Plan(NamedTuple):
    """What `first_that_fits` asks of a plan."""

    step_seconds: float
    peak: int

    @property
    def memory(self) -> Plan:
        return self


PLANS = st.lists(st.builds(Plan, st.integers(10, 30).map(float), st.integers(100, 200)), max_size=20)
FASTEST, LEANEST = Plan(10.0, 210), Plan(40.0, 90)


def _first(plans: list[Plan], limit: int, tried: list[int], tolerance: float = 0.0) -> Plan:
    def make(rung: int) -> Plan:
        tried.append(rung)
        return plans[rung - 1]

    search: Any = first_that_fits
    found: Plan = search(FASTEST, LEANEST, len(plans), make, limit, tolerance)
    return found


def _front(plans: list[Plan]) -> list[Plan]:
    """Return the plans that no other plan beats both in seconds and in bytes."""
    return sorted(
        plan for plan in set(plans) if not any(one != plan and one[0] <= plan[0] and one[1] <= plan[1] for one in plans)
    )


@given(PLANS, st.sampled_from([0.0, 0.1, 1.0]))
def test_where_slower_plans_hold_less_smaller_limits_never_give_faster_plans_nor_plans_that_hold_more(
    plans: list[Plan], tolerance: float
) -> None:
    found = [_first(_front(plans), limit, [], tolerance) for limit in range(90, 210)]
    assert all(held <= limit for limit, (_, held) in zip(range(90, 210), found, strict=True))
    for (slower, less), (faster, more) in itertools.pairwise(found):
        assert slower >= faster
        assert less <= more


@given(PLANS, st.integers(90, 209))
def test_of_the_plans_made_the_fastest_that_fits_is_taken(plans: list[Plan], limit: int) -> None:
    tried: list[int] = []
    found = _first(plans, limit, tried)
    fitting = [LEANEST, *(plans[rung - 1] for rung in tried if plans[rung - 1][1] <= limit)]
    assert found[0] == min(seconds for seconds, _ in fitting)
    assert found in fitting


@given(PLANS, st.integers(90, 209))
def test_few_plans_are_made_and_none_twice(plans: list[Plan], limit: int) -> None:
    tried: list[int] = []
    _first(plans, limit, tried)
    assert len(tried) == len(set(tried)) <= len(plans).bit_length()


@given(st.integers(90, 209))
def test_where_plans_hold_ever_less_the_first_that_fits_is_found(limit: int) -> None:
    plans = [Plan(11.0 + rung, 200 - 5 * rung) for rung in range(20)]
    best = next((plan for plan in plans if plan[1] <= limit), LEANEST)
    assert _first(plans, limit, []) == best


@given(PLANS, st.integers(90, 209))
def test_between_plans_that_are_about_as_fast_none_is_made(plans: list[Plan], limit: int) -> None:
    plans = _front(plans)
    near: list[int] = []
    found = _first(plans, limit, near, 0.25)
    far: list[int] = []
    best = _first(plans, limit, far)
    assert near == far[: len(near)]
    assert best[0] <= found[0] <= 1.25 * best[0] or near == far
    tried: list[int] = []
    assert _first(plans, limit, tried, 3.0) == LEANEST
    assert not tried


def test_equal_sizes_come_in_the_order_of_their_names() -> None:
    assert names_by_size({"b": 5, "c": 9, "a": 5}) == ("c", "a", "b")


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9)), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_has_what_a_smaller_one_has(sizes: dict[str, int], some: float, other: float) -> None:
    few, many = (largest_names(sizes, share) for share in sorted((some, other)))
    assert few <= many == frozenset(names_by_size(sizes)[: len(many)])
    assert largest_names(sizes, 1.0) == frozenset(sizes)
    assert len(largest_names(sizes, 0.0)) == min(len(sizes), 1)


@pytest.mark.parametrize(("batch", "is_remedy"), [(2, False), (4096, True)])
def test_a_smaller_batch_is_a_remedy_where_activations_make_the_peak(batch: int, is_remedy: bool) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="meta") for _ in range(8)))
    example = torch.empty(batch, 64, device="meta")
    with pytest.raises(BudgetError, match="Raise memory_limit to") as caught:
        autoshard.plan(model, {"x": 2}, (example,), memory_limit=1024, optimizer="adamw")
    assert ("make the batch smaller" in str(caught.value)) == is_remedy


class Head(nn.Module):
    """Logits and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(x)
        return functional.cross_entropy(logits, labels), logits


@pytest.mark.parametrize("is_large", [False, True])
def test_to_return_no_logits_is_a_remedy_where_these_are_large(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 32 * 64 + (0 if is_large else 1))
    with torch.device("meta"):
        module, args = Head(), (torch.empty(64, 8), torch.empty(64, dtype=torch.int64))
    with pytest.raises(BudgetError) as caught:
        autoshard.plan(module, {"x": 2}, args, cluster="h100", memory_limit=1024)
    assert ("leave out logits" in str(caught.value)) == is_large
