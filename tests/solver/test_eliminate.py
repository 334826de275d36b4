from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from autoshard.solver import Edge, Problem
from autoshard.solver import eliminate as elimination
from autoshard.solver.eliminate import (
    WidthError,
    eliminate,
    run_order,
)
from autoshard.solver.elimination_order import EliminationGraph, find_order, greedy_order, table_size, weighted_fill
from autoshard.solver.network import Network
from autoshard.solver.tables import Tables
from tests.solver.problems import brute_force, layered_problem, small_problems


@given(problem=small_problems(memory=False))
@settings(max_examples=150, deadline=None)
def test_elimination_is_exact(problem: Problem) -> None:
    exact = eliminate(Network.of(problem, Tables()))
    assert exact.cost == brute_force(problem)
    if exact.choices:
        assert problem.cost([exact.choices[node] for node in range(problem.size)]) == exact.cost


@given(problem=small_problems(memory=False))
@settings(max_examples=50, deadline=None)
def test_any_order_is_exact(problem: Problem) -> None:
    network = Network.of(problem, Tables())
    sizes = {node: len(vector) for node, vector in network.vectors.items()}
    for score in (weighted_fill, table_size):
        _, cost = run_order(network, greedy_order(EliminationGraph(sizes, network.edges, 1e9), score))
        assert cost == brute_force(problem)


def side_by_side(problem: Problem, copies: int) -> Problem:
    """Copies of a problem that have nothing to do with each other."""
    edges = (
        Edge(copy * problem.size + edge.source, copy * problem.size + edge.target, edge.costs)
        for copy in range(copies)
        for edge in problem.edges
    )
    return Problem(problem.costs * copies, tuple(edges))


def test_equal_components_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = clique(5, 4), layered_problem(1, per_layer=12, strategies=4)
    both = Problem(
        one.costs * 2 + other.costs,
        (*side_by_side(one, 2).edges, *(Edge(edge.source + 10, edge.target + 10, edge.costs) for edge in other.edges)),
    )
    solved = []
    run = elimination._run_component
    monkeypatch.setattr(elimination, "_run_component", lambda core, nodes: solved.append(nodes) or run(core, nodes))
    network = Network.of(both, Tables())
    order = find_order({node: len(vector) for node, vector in network.vectors.items()}, network.edges, 1e9)
    choices, cost = run_order(network, order)
    assert sorted(map(len, solved)) == [5, 12]
    assert cost == pytest.approx(2 * eliminate_cost(one) + eliminate_cost(other))
    assert both.cost([choices[node] for node in range(both.size)]) == pytest.approx(cost)


def test_components_that_differ_in_one_entry_are_not_taken_for_equal() -> None:
    one = clique(4, 3)
    costs = list(one.costs * 2)
    costs[5] = costs[5] + np.array([0.0, 1.0, 0.5])
    both = Problem(tuple(costs), side_by_side(one, 2).edges)
    changed = Problem(tuple(costs[4:]), one.edges)
    assert eliminate_cost(both) == pytest.approx(eliminate_cost(one) + eliminate_cost(changed))


def eliminate_cost(problem: Problem) -> float:
    """The optimum, and that the choices cost so much."""
    exact = eliminate(Network.of(problem, Tables()))
    assert problem.cost([exact.choices[node] for node in range(problem.size)]) == pytest.approx(exact.cost)
    return exact.cost


def clique(nodes: int, strategies: int) -> Problem:
    random = np.random.default_rng(0)
    pairs = [(a, b) for a in range(nodes) for b in range(a)]
    edges = tuple(Edge(a, b, random.random((strategies, strategies))) for a, b in pairs)
    return Problem(tuple(random.random((nodes, strategies))), edges)


def test_large_tables_are_swept_to_the_same_optimum() -> None:
    """Seven nodes of six strategies: the first tables are too large to be built at once."""
    problem = clique(7, 6)
    exact = eliminate(Network.of(problem, Tables()))
    assert np.isclose(problem.cost([exact.choices[node] for node in range(7)]), exact.cost)
    assert np.isclose(exact.cost, brute_force_clique(problem))


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
        eliminate(Network.of(clique(12, 6), Tables()))
