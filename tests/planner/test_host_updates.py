"""Optimizer state on the host: what it costs and frees, what plans choose, and that bounds stay bounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.optimizer import optimizer_memory
from autoshard.planner.host_updates import HostUpdate, StateOption, cheapest_cover, update_seconds
from autoshard.planner.limit_search import LimitSearch
from autoshard.planner.plan_checks import checked_flow
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.rerun_context import RerunContext
from autoshard.specs.axes import MeshShape
from tests.memory_models import build
from tests.planner.steps import joint_graph, planner_of
from tests.training import fast_links

MESH = {"x": 2}
PLANNED = Constraints(planned_outputs=True)
ADAMW = optimizer_memory("adamw", None, foreach=True)


def _plan(limit: int | None, offload_optimizer: Any, **options: Any) -> autoshard.ShardingPlan:
    module, inputs = build("GPT")
    given: dict[str, Any] = {"recompute": "none", "cluster": fast_links(), "optimizer": "adamw"} | options
    return autoshard.plan(module, MESH, (), inputs, memory_limit=limit, offload_optimizer=offload_optimizer, **given)


def test_the_update_of_a_parameter_moves_what_it_says() -> None:
    h100 = Cluster.preset("h100")
    cost = CostModel(h100, MeshShape.of(MESH))
    update = HostUpdate.of(ADAMW, cost, (1024, 512), (512, 512), 4)
    held = 512 * 512 * 4
    one_way = h100.device.kernel_overhead + held / h100.device.host_bandwidth
    assert update.to_host == pytest.approx(2 * one_way)
    assert update.from_host == pytest.approx(one_way)
    # Parameter and two moments are read and written, and the gradient is read; and so is the count of steps.
    assert update.update == pytest.approx((7 * held + 8) / h100.device.host_memory_bandwidth)
    assert update.bytes == 4 * held + 4


durations = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(durations, durations, durations), max_size=6))
def test_updates_take_no_less_than_each_stage_and_no_more_than_all(times: list[tuple[float, float, float]]) -> None:
    updates = [HostUpdate(*each, 0) for each in times]
    seconds = update_seconds(updates)
    stages = [sum(stage) for stage in zip(*times, strict=True)] or [0.0]
    assert max(stages) - 1e-9 <= seconds <= sum(map(sum, times)) + 1e-9
    # Paths through a flow shop change from one stage to the next at some update each.
    down, work, up = zip(*times, strict=True) if times else ((), (), ())
    ends = [
        sum(down[: first + 1]) + sum(work[first : last + 1]) + sum(up[last:])
        for first, last in itertools.combinations_with_replacement(range(len(times)), 2)
    ]
    assert seconds == pytest.approx(max(ends, default=0.0))


sizes = st.integers(0, 100)


@given(st.lists(st.tuples(durations, sizes, sizes), max_size=7), sizes, sizes)
def test_a_cover_frees_enough_and_nothing_in_vain(rows: list[tuple[float, int, int]], bytes: int, more: int) -> None:
    options = [StateOption(str(number), *row) for number, row in enumerate(rows)]

    def frees(chosen: Sequence[StateOption]) -> bool:
        state = sum(option.state for option in chosen)
        return state >= bytes and state + sum(option.temporaries for option in chosen) >= bytes + more

    cover = cheapest_cover(options, bytes, bytes + more)
    assert (cover is None) == (not frees(options))
    if cover is not None:
        assert frees(cover)
        assert not any(frees([other for other in cover if other is not option]) for option in cover)


def test_state_on_the_host_is_no_memory_of_the_device() -> None:
    device, host = _plan(None, "none"), _plan(None, "all")
    parameters = {name for name, _ in build("GPT")[0].named_parameters()}
    assert (set(device.hosted), set(host.hosted)) == (set(), parameters)
    assert (device.memory.host, host.memory.optimizer) == (0, 0)
    assert host.memory.host == host.memory.host_optimizer > 4 * host.memory.parameters
    assert host.memory.peak < device.memory.peak
    assert host.update_seconds == 0
    assert host.host_update_seconds > 0
    assert host.step_seconds == pytest.approx(host.step_replay.seconds + host.host_update_seconds, rel=1e-2)
    assert f"that of {len(parameters)} parameters, " in str(host)
    assert "optimizer on the host" in host.to_html()
    again = autoshard.ShardingPlan.from_json(host.to_json())
    assert again == host
    # A file of an earlier version has none of it.
    assert "hosted" not in device.decisions


def test_a_plan_under_a_limit_hosts_no_more_than_it_has_to() -> None:
    with pytest.raises(BudgetError, match=r'optimizer state on the host \(offload_optimizer="all" needs') as caught:
        _plan(1, "none")
    assert caught.value.peak is not None
    least = caught.value.peak
    roomy, tight = (least + _plan(None, "none").memory.peak) // 2, round(0.92 * least)
    assert _plan(roomy, "auto").step_seconds <= _plan(roomy, "none").step_seconds * (1 + 1e-9)
    plan, everything = _plan(tight, "auto"), _plan(tight, "all")
    assert plan.memory.peak <= tight
    assert plan.step_seconds < everything.step_seconds
    assert 0 < len(plan.hosted) < len(everything.hosted)
    assert plan.memory.optimizer > 0
    assert plan.lower_bound <= plan.cost
    assert plan.gap < 0.05


def test_the_host_is_filled_as_far_as_it_has_room() -> None:
    needed = _plan(None, "all").memory.host
    assert _plan(None, "all", host_memory=needed).memory.host == needed
    with pytest.raises(BudgetError, match=r"which has .* \(host_memory, .*offload_optimizer=\"auto\" in place"):
        _plan(None, "all", host_memory=needed - 1)
    with pytest.raises(BudgetError, match="no plan fits"):
        _plan(1, "auto", host_memory=needed // 2)
    with pytest.raises(BudgetError) as caught:
        _plan(1, "none")
    assert caught.value.peak is not None
    limit = round(0.97 * caught.value.peak)
    free = _plan(limit, "auto").memory.host
    assert _plan(limit, "auto", host_memory=free).memory.host <= free


def _context(name: str, mesh: dict[str, int], **options: Any) -> RerunContext:
    planner = planner_of(joint_graph(name), mesh, PLANNED, optimizer=ADAMW)
    return RerunContext(planner, may_host=True, **options)


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_a_solution_costs_and_holds_what_its_program_does(name: str) -> None:
    context = _context(name, {"x": 4}, may_rerun=False)
    free = context.without.solve(context.without.constraints)
    moments, hosted = len(context.rules.operators) + 1, []
    for strength in (0.0, 1.0, 100.0):
        prices = np.full(moments, strength * free.cost / free.memory.peak / moments)
        plan = context.solve(context.constraints, prices=prices)
        planner = plan.estimate.context
        assert isinstance(planner, type(context.without))
        updates = planner.host_updates(planner.flow(plan.decisions))
        account = planner.account(plan.decisions)
        assert account.total_seconds + sum(each.seconds for each in updates) == pytest.approx(plan.cost, rel=2e-2)
        # As a file has it.
        assert checked_flow(context.without, planner.describe(plan)).decisions.hosted == plan.decisions.hosted
        hosted.append(len(plan.decisions.hosted))
    assert hosted[0] == 0
    assert hosted[-1] == len(context.graph.parameters)


@pytest.mark.parametrize(("name", "mesh"), [("gpt", {"x": 4}), ("resnet18", {"x": 4})])
def test_no_plan_that_fits_costs_less_than_the_bound(name: str, mesh: dict[str, int]) -> None:
    context = _context(name, mesh)
    cheapest = context.without.solve(context.without.constraints)
    known, searches = [cheapest, context.whole_layers], []
    for share in (0.9, 0.7, 0.6):
        search = LimitSearch(context, round(share * cheapest.memory.peak), known)
        search.run()
        searches.append(search)
        known = search.met
    assert any(plan.decisions.hosted for plan in known)
    for search in searches:
        fitting = [plan.cost for plan in known if plan.memory.peak <= search.limit]
        if fitting:
            assert 0.9 * min(fitting) < search.bound <= min(fitting) * (1 + 1e-9)


def test_every_choice_of_small_parameters_against_the_search() -> None:
    """Against all sets of hosted parameters on one device, where nothing else is to be decided."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 32, bias=False), nn.Linear(32, 32))
    x, options = torch.randn(4, 64), {"cluster": fast_links(), "recompute": "none"}
    free = autoshard.plan(module, {"x": 1}, (x,), **options)
    everything = autoshard.plan(module, {"x": 1}, (x,), offload_optimizer="all", **options)
    nodes = everything.decisions["hosted"]
    graph = capture(module, (x,), {}, grad=True)
    planner = planner_of(graph, {"x": 1}, cluster=fast_links(), optimizer=optimizer_memory(None, None, foreach=False))
    context = RerunContext(planner, may_rerun=False, may_host=True)
    start = planner.solve(planner.constraints)
    every = [
        context.evaluate(replace(start.decisions, hosted=frozenset(chosen)), 0.0, 0.0, "")
        for count in range(len(nodes) + 1)
        for chosen in itertools.combinations(nodes, count)
    ]
    for share in (0.95, 0.85, 0.75, 0.65):
        limit = round(share * free.memory.peak)
        fitting = [plan.step_seconds for plan in every if plan.memory.peak <= limit]
        if not fitting:
            continue
        plan = autoshard.plan(module, {"x": 1}, (x,), offload_optimizer="auto", memory_limit=limit, **options)
        assert plan.memory.peak <= limit
        assert min(fitting) * (1 - 1e-9) <= plan.step_seconds <= min(fitting) * 1.02


def test_options_are_checked() -> None:
    x = torch.randn(8, 16)
    with pytest.raises(PlanError, match="offload_optimizer='some' is unknown: choose one of none, all, auto"):
        autoshard.plan(nn.Linear(16, 16), MESH, (x,), offload_optimizer="some")  # type: ignore[arg-type]
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    with pytest.raises(PlanError, match="offload_optimizer: its stages keep their optimizer's state on the device"):
        autoshard.plan(layers, {"pp": 2}, (x,), cluster=fast_links(), offload_optimizer="all")


def test_state_of_whole_matrices_is_refused_before_a_plan_is_made() -> None:
    for choice in ("all", "auto"):
        with pytest.raises(PlanError, match=r"offload_optimizer='.*' with optimizer='adafactor'"):
            autoshard.plan(
                torch.nn.Linear(4, 4), {"x": 2}, (torch.ones(4, 4),), optimizer="adafactor", offload_optimizer=choice
            )
