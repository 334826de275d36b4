"""The bound of all plans within a limit: below every plan that is met, and of memory that every program holds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.planner.limit_search import LimitSearch
from autoshard.planner.planning import plan_with_recompute
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.rerun_context import RerunContext
from autoshard.planner.solving import SolveOptions, solve_by_messages
from autoshard.solver.reduced_problem import ReducedProblem
from autoshard.solver.solver_budget import Budget
from benchmarks.architectures import gpt2_medium
from tests import models
from tests.planner.steps import joint_graph, planner_of
from tests.training import fast_links

PLANNED = Constraints(planned_outputs=True)


def _context(name: str, mesh: dict[str, int], compiled: bool = False, **options: Any) -> RerunContext:
    module, inputs = models.ZOO[name]()
    cluster = fast_links().with_compiler if compiled else fast_links()
    return RerunContext(planner_of(capture(module, (), inputs, grad=True), mesh, PLANNED, cluster), **options)


MODELS = ("gpt", "hf_gemma", "hf_roberta", "resnet18", "unet", "lstm")


@pytest.mark.parametrize(
    ("name", "may_rerun", "compiled"),
    [
        *itertools.product(MODELS, (True, False), (False,)),
        # What kernels compute where they read it counts for nothing.
        *itertools.product(("hf_gemma", "hf_roberta"), (True,), (True,)),
    ],
)
def test_no_program_holds_less_than_a_bound_counts(name: str, may_rerun: bool, compiled: bool) -> None:
    context = _context(name, {"x": 2, "y": 2}, compiled, may_rerun=may_rerun)
    builder = context.builder.with_constraints(replace(context.constraints, bounding=True))
    first = context.without.solve(context.without.constraints)
    moments = len(context.rules.operators) + 1
    random = np.random.default_rng(0)
    counted = []
    for strength in (0.1, 1.0, 10.0):
        # Every moment has a price: an assignment that holds something in vain is no plan.
        weights = 0.3 / moments + 0.7 * random.dirichlet(np.full(moments, 0.1))
        prices = weights * strength * first.step_seconds / first.memory.peak
        built = builder.build(frozenset(context.axes), None, prices, None, "all")
        whole = ReducedProblem.of(built.problem, built.program_positions)
        options = SolveOptions("auto", Budget.of_seconds(60), priced=True)
        assignment = solve_by_messages(whole, whole, options).assignment
        held = built.held_bytes(assignment, moments)
        cost = built.plain.problem.cost(assignment)
        # What is priced is what is counted.
        assert prices @ held == pytest.approx(built.problem.cost(assignment) - cost, rel=1e-6)
        plan = context.evaluate(built.decode(assignment), cost, 0.0, "messages")
        assert held.max() <= plan.memory.peak * (1 + 1e-9)
        counted.append(held.max() / plan.memory.peak)
    # It would hold for nothing, too.
    assert max(counted) > 0.3


@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt", {"x": 4}), ("hf_llama", {"x": 4}), ("resnet18", {"x": 4}), ("gpt", {"x": 2, "y": 2})]
)
def test_no_plan_that_fits_costs_less_than_the_bound(name: str, mesh: dict[str, int]) -> None:
    context = _context(name, mesh)
    cheapest = context.without.solve(context.without.constraints)
    known = [cheapest, context.whole_layers]
    searches = []
    for share in (0.97, 0.93, 0.9):
        search = LimitSearch(context, round(share * cheapest.memory.peak), known)
        search.run()
        searches.append(search)
        known = search.met  # those that were met for one limit are known for the next
    for search in searches:
        fitting = [plan.cost for plan in known if plan.memory.peak <= search.limit]
        assert min(fitting) >= search.bound * (1 - 1e-9)
        assert search.bound > 0.9 * min(fitting)


@pytest.mark.parametrize("share", [0.95, 0.9, 0.85])
def test_the_gap_of_a_plan_is_that_of_sharding_and_recomputation_together(share: float) -> None:
    module, inputs = gpt2_medium(batch=64)
    graph = capture(module, (), inputs, grad=True)
    h100 = Cluster.preset("h100")
    free = planner_of(graph, {"x": 8}, PLANNED, h100).plan()
    limit = round(share * free.memory.peak)
    plan = plan_with_recompute(planner_of(graph, {"x": 8}, PLANNED, h100, memory_limit=limit))
    assert plan.recomputed
    assert free.lower_bound < plan.lower_bound <= plan.cost
    # Without a limit the bound is of little use here.
    assert 1.0 - free.lower_bound / plan.cost > 0.01
    assert plan.gap < 0.01


def test_an_interrupted_search_tells_a_bound_of_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = joint_graph("gpt")
    free = planner_of(graph, {"x": 4}, PLANNED).plan()

    def interrupt(search: LimitSearch) -> None:
        raise KeyboardInterrupt

    # Plans at prices of memory were met, and the best of them is returned.
    monkeypatch.setattr(LimitSearch, "_mix", interrupt)
    with pytest.warns(UserWarning, match="interrupted"):
        plan = plan_with_recompute(planner_of(graph, {"x": 4}, PLANNED, memory_limit=round(0.6 * free.memory.peak)))
    assert free.lower_bound <= plan.lower_bound <= plan.cost


def test_meshes_of_three_axes_keep_the_bound_without_a_limit() -> None:
    graph = joint_graph("mlp")
    planner = planner_of(graph, {"x": 2, "y": 2, "z": 2}, PLANNED)
    limit = round(0.95 * planner.plan().memory.peak)
    plan = plan_with_recompute(planner_of(graph, {"x": 2, "y": 2, "z": 2}, PLANNED, memory_limit=limit))
    assert 0.0 < plan.lower_bound <= plan.cost
