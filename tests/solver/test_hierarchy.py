"""The hierarchy: its backbone and order, exact where nothing is dropped, near where survivors are few."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import Edge, Problem, SolverError, solve
from autoshard.solver.hierarchy import backbone, interleaved_order, merge_segments, solve_in_segments
from tests.solver.problems import brute_force, layered_problem, small_problems, two_axes

ALL = 10**6
"""More survivors than a small problem has assignments."""


def graph(work: list[float], ends: list[tuple[int, int]], strategies: int = 2) -> Problem:
    """Nodes of the given least costs; edges whose tables say nothing."""
    costs = tuple(np.linspace(least, 2 * least + 1, strategies) for least in work)
    return Problem(costs, tuple(Edge(one, other, np.ones((strategies, strategies))) for one, other in ends))


def training_step(layers: int, *, strategies: int = 6, seed: int = 0) -> Problem:
    """A chain with short cuts there and back; each layer is joined with a weight and with its own backward half.

    Nodes in the order of the program: every weight before the layer of the forward half that uses it.
    """
    random = np.random.default_rng(seed)
    weights, forward = range(0, 2 * layers, 2), range(1, 2 * layers, 2)
    backward = range(3 * layers - 1, 2 * layers - 1, -1)
    ends = [(forward[-1], backward[-1])]
    for half in (forward, backward[::-1]):
        ends += [*pairwise(half), *zip(half, half[2:], strict=False)]
    for layer in range(layers):
        ends += [(weights[layer], forward[layer]), (weights[layer], backward[layer]), (forward[layer], backward[layer])]
    tables = {end: random.random((strategies, strategies)) for end in ends}
    costs = tuple(random.random(strategies) for _ in range(3 * layers))
    return Problem(costs, tuple(Edge(one, other, table) for (one, other), table in tables.items()))


def test_the_backbone_is_the_longest_path_and_its_heavy_nodes_are_critical() -> None:
    # 0 -> 1 -> 3 -> 4 is longer than 0 -> 2 -> 4; 1 and 2 do most of the work
    problem = graph([1.0, 50.0, 60.0, 0.1, 40.0], [(0, 1), (1, 3), (3, 4), (0, 2), (2, 4)])
    result = backbone(problem, range(5))
    assert result.nodes == (0, 1, 3, 4)
    assert result.critical == (1,)


def test_the_backbone_follows_the_order_and_not_the_direction_of_edges() -> None:
    problem = graph([1.0] * 4, [(0, 1), (2, 1), (3, 2)])
    assert backbone(problem, [0.0, 1.0, 2.0, 3.0]).nodes == (0, 1, 2, 3)
    assert backbone(problem, [0.0, 3.0, 2.0, 1.0]).nodes == (3, 2, 1)


def test_nothing_is_critical_where_nothing_costs() -> None:
    assert backbone(graph([0.0] * 3, [(0, 1), (1, 2)]), range(3)).critical == ()


def test_both_halves_lie_side_by_side() -> None:
    problem = training_step(9)
    place = np.argsort(interleaved_order(problem, range(problem.size)))
    assert max(edge.target - edge.source for edge in problem.edges) == 26
    assert max(abs(place[edge.source] - place[edge.target]) for edge in problem.edges) <= 6


def test_what_does_not_turn_keeps_its_order() -> None:
    chain = graph([1.0] * 6, [(node, node + 1) for node in range(5)])
    assert list(interleaved_order(chain, range(6))) == list(range(6))


def test_an_order_holds_every_node_once() -> None:
    problem = layered_problem(2, per_layer=30)
    assert sorted(interleaved_order(problem, range(problem.size))) == list(range(problem.size))


@settings(max_examples=30, deadline=None)
@given(small_problems(memory=False), st.integers(0, 2**16))
def test_exact_where_nothing_is_dropped(problem: Problem, seed: int) -> None:
    order = np.random.default_rng(seed).random(problem.size)
    result = solve_in_segments(problem, order, width=ALL)
    optimum = brute_force(problem)
    assert result.cost == pytest.approx(optimum) or not result.assignment
    assert bool(result.assignment) == np.isfinite(optimum)
    assert result.lower_bound <= optimum + 1e-9 * abs(optimum) or not np.isfinite(optimum)


@settings(max_examples=30, deadline=None)
@given(small_problems(memory=False), st.integers(1, 4), st.lists(st.integers(0, 5), max_size=3))
def test_stitching_returns_what_it_may(problem: Problem, width: int, pivots: list[int]) -> None:
    edges = {(min(edge.source, edge.target), max(edge.source, edge.target)): edge for edge in problem.edges}
    turned = tuple(
        Edge(one, other, edge.costs if edge.source == one else edge.costs.T) for (one, other), edge in edges.items()
    )
    problem = replace(problem, edges=turned)
    expected = [np.zeros(edge.costs.shape[0]) for edge in turned]
    result = merge_segments(problem, expected, set(pivots), width)
    assert not result or np.isfinite(problem.cost(result))
    everything = merge_segments(problem, expected, set(pivots), ALL)
    assert (problem.cost(everything) if everything else np.inf) == pytest.approx(brute_force(problem))


@pytest.mark.parametrize("seed", range(3))
def test_few_survivors_are_near_the_optimum_of_a_training_step(seed: int) -> None:
    problem = training_step(12, seed=seed)
    result = solve_in_segments(problem, range(problem.size))
    optimum = solve(problem, method="eliminate").cost
    assert result.lower_bound <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= result.cost <= optimum * 1.01
    assert result.cost == pytest.approx(problem.cost(result.assignment))


def test_few_survivors_are_near_the_bound_on_two_axes() -> None:
    problem = two_axes(150)
    result = solve_in_segments(problem, range(problem.size))
    best = solve(problem)
    assert best.lower_bound * (1 - 1e-9) <= result.cost <= best.cost * 1.03
    assert result.lower_bound <= best.cost


def test_equal_problems_get_equal_answers() -> None:
    problem = training_step(20)
    assert solve_in_segments(problem, range(60)) == solve_in_segments(training_step(20), range(60))


def test_it_tells_how_it_cut() -> None:
    result = solve_in_segments(training_step(12), range(36))
    assert 0 < result.critical < result.cones < 36
    assert 1 < result.segments <= result.critical + 1


def test_an_impossible_problem_has_no_assignment() -> None:
    nothing = np.full((2, 2), np.inf)
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, nothing),))
    result = solve_in_segments(problem, range(2))
    assert result.assignment == ()
    assert result.cost == result.lower_bound == np.inf


def test_a_limit_that_binds_is_refused() -> None:
    usages = (np.array([9.0, 1.0]), np.array([9.0, 1.0]))
    problem = replace(graph([1.0, 1.0], [(0, 1)]), usages=usages, intervals=((0, 2), (0, 2)), limit=5.0)
    with pytest.raises(SolverError, match="limit of 5 binds: what was found peaks at 18"):
        solve_in_segments(problem, range(2))
    assert solve_in_segments(replace(problem, limit=20.0), range(2)).cost == pytest.approx(3.0)
