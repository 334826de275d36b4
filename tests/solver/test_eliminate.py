from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem
from autoshard.solver.core import Core
from autoshard.solver.eliminate import WidthError, eliminate, run_order
from autoshard.solver.elimination_order import EliminationGraph, greedy_order, logarithmic_fill, weighted_fill
from tests.solver.problems import brute_force, small_problems


@given(problem=small_problems(memory=False))
@settings(max_examples=150, deadline=None)
def test_elimination_is_exact(problem: Problem) -> None:
    exact = eliminate(Core.of(problem))
    assert exact.cost == brute_force(problem)
    if exact.places is not None:
        assert problem.cost(exact.places.tolist()) == exact.cost


@given(problem=small_problems(memory=False))
@settings(max_examples=50, deadline=None)
def test_any_order_is_exact(problem: Problem) -> None:
    core = Core.of(problem)
    sizes = dict(enumerate(core.size.tolist()))
    for score, chains in product((weighted_fill, logarithmic_fill), (False, True)):
        order = greedy_order(EliminationGraph(sizes, core.neighbours(), 1e9), score, chains=chains)
        assert run_order(core, order).cost == brute_force(problem)


def eliminate_cost(problem: Problem) -> float:
    """The optimum, and that the choices cost so much."""
    exact = eliminate(Core.of(problem))
    assert exact.places is not None
    assert problem.cost(exact.places.tolist()) == pytest.approx(exact.cost)
    return exact.cost


def clique(nodes: int, strategies: int) -> Problem:
    random = np.random.default_rng(0)
    pairs = [(a, b) for a in range(nodes) for b in range(a)]
    edges = tuple(Edge(a, b, random.random((strategies, strategies))) for a, b in pairs)
    return Problem(tuple(random.random((nodes, strategies))), edges)


def test_large_tables_are_swept_to_the_same_optimum() -> None:
    """Seven nodes of six strategies: the first tables are too large to be built at once."""
    problem = clique(7, 6)
    assert np.isclose(eliminate_cost(problem), brute_force_clique(problem))


def brute_force_clique(problem: Problem) -> float:
    """All assignments at once, by broadcasting."""
    count = problem.size
    total = np.zeros((1,) * count)
    for node, vector in enumerate(problem.costs):
        total = total + vector.reshape([-1 if axis == node else 1 for axis in range(count)])
    for edge in problem.edges:
        table = edge.costs if edge.source < edge.target else edge.costs.T
        low, high = sorted((edge.source, edge.target))
        total = total + table.reshape([len(problem.costs[axis]) if axis in (low, high) else 1 for axis in range(count)])
    return float(total.min())


def test_a_wide_problem_is_refused_before_any_work() -> None:
    with pytest.raises(WidthError, match="too entangled"):
        eliminate(Core.of(clique(12, 6)))
