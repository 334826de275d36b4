"""Plans that hide their reductions behind compute: priced as they are counted, and chosen where they are faster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from autoshard.cluster.cluster import CONTENTION
from autoshard.planner.overlap_search import OverlapSearch, compute_before, hidden_seconds
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints, HideableKind, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.solver import solve
from autoshard.specs.emitter import GRADIENT_BUCKET_BYTES
from tests.planner.steps import every_parameter, joint_graph, links, plan_of, planner_of


def _planner(bandwidth: float = 6e8, **settings: int) -> Planner:
    """Gradients that fill several groups, on links so slow that they take a good part of the step."""
    graph = joint_graph("gpt", batch=192, hidden=768, layers=3, dtype=torch.float64)
    return planner_of(graph, {"x": 4}, cluster=links(bandwidth, 1e-6), **settings)


def _sharded(planner: Planner) -> Constraints:
    return replace(planner.constraints, forced=frozenset(every_parameter(planner.graph)))


@pytest.mark.parametrize("kind", ["reductions", "gathers"])
@pytest.mark.parametrize("price", [CONTENTION, 0.8, 1.0])
def test_a_problem_prices_what_is_hidden_as_the_account_counts_it(price: float, kind: HideableKind) -> None:
    planner = _planner()
    discount = OverlapDiscount(kind, np.linspace(1e-2, 0.0, len(planner.rules.operators) + 2), price)
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, _sharded(planner))
    built = builder.build(frozenset({0}), discount=discount)
    solution = solve(built.problem)
    hidden = hidden_seconds(planner.account(built.decode(solution.assignment)), discount)
    assert hidden > 0
    plain = builder.build(frozenset({0})).problem.cost(solution.assignment)
    assert solution.cost == pytest.approx(plain - (1 - price) * hidden, rel=1e-12)


def test_a_plan_that_hides_more_is_chosen_where_it_is_faster() -> None:
    planner = _planner()
    first = planner.solve(planner.constraints)
    found = OverlapSearch(planner, first).run()
    assert found.step_seconds < 0.995 * first.step_seconds
    assert found.cost > first.cost
    assert found.lower_bound == first.lower_bound
    assert found.method.endswith(("reductions hidden", "gathers hidden", "parameters sharded"))
    assert planner.plan().step_seconds == found.step_seconds


def test_the_corners_found_are_convex_and_the_fastest_of_them_is_chosen() -> None:
    planner = _planner()
    search = OverlapSearch(planner, planner.solve(planner.constraints))
    found = search.run()
    for curve in search.curves:
        assert len(curve.points) > 1
        for point in curve.points:
            assert point.value(1.0) >= curve.first.value(1.0) * (1 - 1e-9)
            assert point.value(curve.full_discount.price) >= curve.points[1].value(curve.full_discount.price) * (
                1 - 1e-9
            )
            assert found.step_seconds <= 1.001 * point.step


def test_a_memory_limit_rules_out_plans_that_hold_more() -> None:
    free = _planner().plan()
    planner = _planner()
    first = planner.solve(planner.constraints)
    assert first.memory.peak < free.memory.peak
    limited = _planner(memory_limit=first.memory.peak).plan()
    assert limited.memory.peak <= first.memory.peak
    assert limited.step_seconds >= free.step_seconds


def test_without_gradients_there_is_nothing_to_hide() -> None:
    plan = plan_of(joint_graph("gpt", grad=False), {"x": 4}, cluster=links(4e9, 1e-6))
    assert plan.method == "eliminate"
    assert plan.gap == 0.0


def test_what_hides_a_reduction_lies_behind_the_last_of_its_group() -> None:
    planner = _planner()
    search = OverlapSearch(planner, planner.solve(planner.constraints))
    account = planner.account(search.first.decisions)
    behind = next(curve.full_discount.compute for curve in search.curves if curve.full_discount.kind == "reductions")
    reductions = [reduction for reduction in account.reshards if reduction.gradient]
    seconds = [account.seconds(node) for node in planner.rules.operators]
    last = reductions[-1]
    assert behind[last.position] == pytest.approx(sum(seconds[last.position :]))
    alone = [reduction for reduction in reductions if reduction.path.steps[0].bytes > GRADIENT_BUCKET_BYTES]
    small = [reduction for reduction in reductions if reduction.path.steps[0].bytes < GRADIENT_BUCKET_BYTES // 100]
    assert all(behind[reduction.position] < sum(seconds[reduction.position :]) for reduction in small[:1])
    assert all(behind[reduction.position] == pytest.approx(sum(seconds[reduction.position :])) for reduction in alone)


def test_what_hides_a_gather_lies_before_what_needs_it_in_the_same_half() -> None:
    planner = _planner()
    account = planner.account(planner.solve(_sharded(planner)).decisions)
    before = compute_before(account)
    seconds = [account.seconds(node) for node in planner.rules.operators]
    halves = [planner.graph.phase(node) for node in planner.rules.operators]
    gathers = dict(account.hideable("gathers"))
    assert gathers
    for moment in gathers.values():
        same = [one for one, half in zip(seconds[:moment], halves[:moment], strict=True) if half == halves[moment]]
        assert before[moment] == pytest.approx(sum(same))


def test_gathers_behind_compute_shard_parameters_that_their_sum_leaves_whole() -> None:
    graph = joint_graph("gpt", batch=512)
    planner = planner_of(graph, {"x": 4}, Constraints(planned_outputs=True), links(bandwidth=1e9, latency=1e-6))
    first = planner.solve(planner.constraints)
    assert not any(spec.shard_axes for name, spec in first.decisions.rest.items() if name.startswith("primals"))
    plan = planner.plan()
    assert plan.step_seconds < first.step_seconds
    assert any(isinstance(placement, Shard) for placements in plan.placements.values() for placement in placements)
