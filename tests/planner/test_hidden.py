"""Plans that hide their reductions behind compute: priced as they are counted, and chosen where they are faster."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autoshard.cluster.cluster import CONTENTION
from autoshard.cluster.cost import GROUPED_BYTES
from autoshard.planner.account import Account
from autoshard.planner.building import ProblemBuilder
from autoshard.planner.hidden import HiddenReductions
from autoshard.planner.planner import Planner
from autoshard.planner.problem import Hiding
from autoshard.solver import solve
from tests.planner.steps import captured, links, plan_of, planner_of


def _planner(bandwidth: float = 6e8, **settings: int) -> Planner:
    """Gradients that fill several groups, on links so slow that they take a good part of the step."""
    graph = captured("gpt", batch=192, hidden=768, layers=3, dtype=torch.float64)
    return planner_of(graph, {"x": 4}, cluster=links(bandwidth, 1e-6), **settings)


def _hidden(account: Account, behind: np.ndarray) -> float:
    """Seconds of a step's reductions of gradients that have so much compute behind them."""
    reductions = (leg for leg in account.legs if leg.gradient)
    return sum(min(leg.path.seconds, float(behind[leg.position])) for leg in reductions)


@pytest.mark.parametrize("price", [CONTENTION, 0.8, 1.0])
def test_a_problem_prices_what_is_hidden_as_the_account_counts_it(price: float) -> None:
    planner = _planner()
    behind = np.linspace(1e-2, 0.0, len(planner.rules.operators) + 2)
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.wishes)
    built = builder.build(frozenset({0}), hiding=Hiding(behind, price))
    solution = solve(built.problem)
    hidden = _hidden(planner.account(built.decode(solution.assignment)), behind)
    assert hidden > 0
    plain = builder.build(frozenset({0})).problem.cost(solution.assignment)
    assert solution.cost == pytest.approx(plain - (1 - price) * hidden, rel=1e-12)


def test_a_plan_that_hides_more_is_chosen_where_it_is_faster() -> None:
    planner = _planner()
    first = planner.solve(planner.wishes)
    found = HiddenReductions(planner, first).run()
    assert found.step_seconds < 0.995 * first.step_seconds
    assert found.cost > first.cost
    assert found.lower_bound == first.lower_bound
    assert found.method.endswith("reductions hidden")
    assert planner.plan().step_seconds == found.step_seconds


def test_the_corners_found_are_convex_and_the_fastest_of_them_is_chosen() -> None:
    planner = _planner()
    search = HiddenReductions(planner, planner.solve(planner.wishes))
    found = search.run()
    assert len(search.points) > 2
    for point in search.points:
        assert point.value(1.0) >= search.first.value(1.0) * (1 - 1e-9)
        assert point.value(CONTENTION) >= search.points[1].value(CONTENTION) * (1 - 1e-9)
    chosen = next(point for point in search.points if point.found.decisions == found.decisions)
    assert chosen.step <= 1.001 * min(point.step for point in search.points)


def test_a_memory_limit_rules_out_plans_that_hold_more() -> None:
    free = _planner().plan()
    planner = _planner()
    first = planner.solve(planner.wishes)
    assert first.memory.peak < free.memory.peak
    limited = _planner(memory_limit=first.memory.peak).plan()
    assert limited.memory.peak <= first.memory.peak
    assert limited.step_seconds >= free.step_seconds


def test_without_gradients_there_is_nothing_to_hide() -> None:
    plan = plan_of(captured("gpt", grad=False), {"x": 4}, cluster=links(4e9, 1e-6))
    assert plan.method == "eliminate"
    assert plan.gap == 0.0


def test_what_hides_a_reduction_lies_behind_the_last_of_its_group() -> None:
    planner = _planner()
    search = HiddenReductions(planner, planner.solve(planner.wishes))
    account = planner.account(search.first.found.decisions)
    legs = [leg for leg in account.legs if leg.gradient]
    seconds = [account.seconds(node) for node in planner.rules.operators]
    last = legs[-1]
    assert search.behind[last.position] == pytest.approx(sum(seconds[last.position :]))
    alone = [leg for leg in legs if leg.path.steps[0].bytes > GROUPED_BYTES]
    small = [leg for leg in legs if leg.path.steps[0].bytes < GROUPED_BYTES // 100]
    assert all(search.behind[leg.position] < sum(seconds[leg.position :]) for leg in small[:1])
    assert all(search.behind[leg.position] == pytest.approx(sum(seconds[leg.position :])) for leg in alone)
