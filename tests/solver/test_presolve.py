from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem
from autoshard.solver.chains import Chains
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.presolve import FOLD, REDUCE, THOROUGH, forbid_oversized, presolve, thin_memory
from tests.solver.problems import brute_force, small_problems


def optimum(core: Core) -> float:
    """The optimum of a core, by trying everything."""
    every = (np.array(choice, dtype=np.int64) for choice in product(*(range(size) for size in core.size)))
    fits = (places for places in every if (core.loads(places) <= core.slack).all())
    return min((core.value(places) for places in fits), default=np.inf) if core.feasible else np.inf


@pytest.mark.parametrize("effort", [FOLD, REDUCE, THOROUGH])
@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_presolve_keeps_an_optimum_and_leads_back_to_it(problem: Problem, effort: int) -> None:
    best = brute_force(problem)
    core = presolve(Core.of(problem), effort=effort)
    assert optimum(core) == pytest.approx(best)
    if not np.isfinite(best):
        return
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        assignment = core.expand(places).tolist()
        if np.isfinite(core.value(places)):  # a pair that another one beats is forbidden
            assert problem.cost(assignment) == pytest.approx(core.value(places))
        assert core.contract(core.expand(places)).tolist() == list(choice)
        if (core.loads(places) <= core.slack).all():
            assert problem.within_limit(problem.peak(assignment))


@given(problem=small_problems(memory=False))
@settings(max_examples=60, deadline=None)
def test_folding_loses_no_choice_that_is_allowed(problem: Problem) -> None:
    core = presolve(Core.of(problem), effort=FOLD)
    for choice in product(*(range(len(vector)) for vector in problem.costs)):
        cost = problem.cost(choice)
        if np.isfinite(cost):
            assert core.value(core.contract(np.array(choice))) <= cost + 1e-9


def test_chains_and_trees_vanish() -> None:
    random = np.random.default_rng(0)
    chain = Problem((random.random(4),) * 30, tuple(Edge(n - 1, n, random.random((4, 4))) for n in range(1, 30)))
    core = presolve(Core.of(chain), effort=FOLD)
    assert not core.nodes
    assert np.isclose(core.constant, chain.cost(core.expand(np.zeros(0, dtype=np.int64)).tolist()))


def test_separable_edges_are_dropped() -> None:
    random = np.random.default_rng(0)
    separable = random.random(5)[:, None] + random.random(5)[None, :]
    pairs = [(a, b) for a in range(6) for b in range(a)]
    problem = Problem(tuple(random.random((6, 5))), tuple(Edge(a, b, separable) for a, b in pairs))
    assert not presolve(Core.of(problem), effort=FOLD).nodes


@given(problem=small_problems())
@settings(max_examples=40, deadline=None)
def test_presolve_below_a_known_cost_keeps_what_is_better(problem: Problem) -> None:
    best = brute_force(problem)
    if np.isfinite(best):
        core = presolve(Core.of(problem))
        assert optimum(presolve(core, upper=best + 1.0)) == pytest.approx(best)
        assert optimum(presolve(core, upper=best)) >= best


def test_a_determined_node_is_merged_with_its_memory() -> None:
    """Node 1 must choose as node 0 does; node 0 alone would take its first strategy, together that passes the limit."""
    same = np.array([[0.0, np.inf], [np.inf, 0.0]])
    usages = (np.array([5.0, 4.0]), np.array([6.0, 1.0]))
    costs = (np.array([0.0, 1.0]), np.zeros(2))
    problem = Problem(costs, (Edge(0, 1, same),), usages, ((0, 2), (1, 3)), 10.0)
    core = presolve(Core.of(problem))
    assert core.nodes == 0
    assert core.constant == 1.0
    assert core.expand(np.zeros(0, dtype=np.int64)).tolist() == [1, 1]


def test_arrays_grow_when_a_merge_needs_room() -> None:
    """A node with many neighbours is merged into one with more strategies: every table becomes larger."""
    random = np.random.default_rng(0)
    wide, narrow, neighbours = 12, 2, 60
    determines = np.full((wide, narrow), np.inf)
    determines[np.arange(wide), np.arange(wide) % narrow] = 0.0
    costs = [random.random(wide), random.random(narrow)]
    edges = [Edge(0, 1, determines)]
    for node in range(2, 2 + neighbours):
        costs.append(random.random(4))
        edges.append(Edge(1, node, random.random((narrow, 4))))
        edges.append(Edge(0, node, random.random((wide, 4))))
        if node > 2:
            edges.append(Edge(node - 1, node, random.random((4, 4))))
    usages = tuple(np.ceil(10 * random.random(len(vector))) for vector in costs)
    problem = Problem(tuple(costs), tuple(edges), usages, ((0, 9),) * len(costs), 400.0)
    core = presolve(Core.of(problem))
    assert core.feasible
    assert len(core.table) > sum(edge.costs.size for edge in problem.edges) // 3
    places = Chains(CoreArrays.of(core).graph, core.cost).round()
    assert np.isfinite(core.value(places))
    assert problem.cost(core.expand(places).tolist()) == pytest.approx(core.value(places))


def test_nothing_fits_where_the_least_usage_passes_the_limit() -> None:
    problem = Problem((np.zeros(2),), (), (np.array([3.0, 4.0]),), ((0, 1),), 2.0)
    assert not presolve(Core.of(problem)).feasible
    assert presolve(Core.of(replace(problem, limit=3.0))).feasible


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_moments_left_out_are_implied(problem: Problem) -> None:
    core = Core.of(problem)
    thin = thin_memory(core)
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        kept = bool((thin.loads(places) <= thin.slack).all()) and thin.feasible
        assert kept == bool((core.loads(places) <= core.slack).all())


@given(problem=small_problems())
@settings(max_examples=60, deadline=None)
def test_strategies_too_large_by_themselves_are_in_no_feasible_choice(problem: Problem) -> None:
    core = thin_memory(Core.of(problem))
    left = forbid_oversized(core)
    gone = np.isfinite(core.cost) & np.isinf(left.cost)
    for choice in product(*(range(size) for size in core.size)):
        places = np.array(choice, dtype=np.int64)
        if core.feasible and (core.loads(places) <= core.slack).all():
            assert not gone[core.offset[:-1] + places].any()
