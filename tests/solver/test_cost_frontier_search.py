"""Cost frontiers: exact ones against trying everything, thinned ones against what they promise."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import CostFrontier, Edge, Problem, SolverError, cost_frontier
from autoshard.solver.cost_frontier_search import undominated_strategies
from tests.solver.problems import layered_problem, small_problems

METHODS = ("ldp", "elimination")


def held(problem: Problem, assignment: tuple[int, ...], tables: list[np.ndarray] | None = None) -> float:
    assert problem.usages is not None
    total = sum(float(usage[choice]) for usage, choice in zip(problem.usages, assignment, strict=True))
    for edge, table in zip(problem.edges, tables or (), strict=bool(tables)):
        total += float(table[assignment[edge.source], assignment[edge.target]])
    return total


def brute_force(problem: Problem, tables: list[np.ndarray] | None = None) -> list[tuple[float, float]]:
    """The frontier of (memory, time), by trying everything."""
    every = product(*(range(len(vector)) for vector in problem.costs))
    points = sorted((held(problem, choice, tables), problem.cost(choice)) for choice in every)
    kept: list[tuple[float, float]] = []
    for memory, time in points:
        if np.isfinite(time) and (not kept or time < kept[-1][1]):
            kept.append((memory, time))
    return kept


def points_of(frontier: CostFrontier) -> list[tuple[float, float]]:
    return list(zip(frontier.memory.tolist(), frontier.time.tolist(), strict=True))


def check_assignments(problem: Problem, frontier: CostFrontier, tables: list[np.ndarray] | None = None) -> None:
    """Every point is what its assignment costs and holds."""
    for (memory, time), assignment in zip(points_of(frontier), frontier.assignments.tolist(), strict=True):
        assert problem.cost(assignment) == pytest.approx(time, rel=1e-9, abs=1e-9)
        assert held(problem, tuple(assignment), tables) == pytest.approx(memory, rel=1e-9, abs=1e-9)


def positive(problem: Problem) -> Problem:
    """The problem with costs above zero, which shares of time are taken of."""
    edges = tuple(Edge(edge.source, edge.target, edge.costs + 4.0) for edge in problem.edges)
    return Problem(tuple(vector + 4.0 for vector in problem.costs), edges, problem.usages, problem.intervals)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(small_problems(), st.integers(0, 2**32 - 1), st.booleans())
def test_the_exact_frontier(method: str, problem: Problem, seed: int, on_edges: bool) -> None:
    random = np.random.default_rng(seed)
    tables = [random.integers(0, 9, edge.costs.shape).astype(float) for edge in problem.edges] if on_edges else None
    frontier = cost_frontier(problem, method=method, edge_usages=tables)  # type: ignore[arg-type]
    assert points_of(frontier) == brute_force(problem, tables)
    assert (frontier.gap, frontier.fixed_nodes) == (0.0, 0)
    check_assignments(problem, frontier, tables)


@settings(max_examples=60, deadline=None)
@given(small_problems(), st.sampled_from(METHODS), st.sampled_from([0.02, 0.3]), st.sampled_from([None, 1, 2]))
def test_a_thinned_frontier_keeps_its_promise(problem: Problem, method: str, epsilon: float, limit: int | None) -> None:
    problem = positive(problem)
    frontier = cost_frontier(problem, method=method, epsilon=epsilon, limit=limit)  # type: ignore[arg-type]
    check_assignments(problem, frontier)
    if limit is None:
        assert frontier.gap <= epsilon
    for memory, time in brute_force(problem):
        bound = (1 + frontier.gap) * time * (1 + 1e-9)
        assert any(less <= memory and faster <= bound for less, faster in points_of(frontier))


@settings(max_examples=60, deadline=None)
@given(small_problems(), st.sampled_from(METHODS))
def test_settled_nodes_leave_both_ends(problem: Problem, method: str) -> None:
    frontier = cost_frontier(problem, method=method, cells=3)  # type: ignore[arg-type]
    check_assignments(problem, frontier)
    exact = brute_force(problem)
    assert bool(exact) == bool(len(frontier))
    if exact:
        assert frontier.memory[0] == exact[0][0]
        assert frontier.time[-1] == exact[-1][1]
        assert (np.diff(frontier.memory) > 0).all()
        assert (np.diff(frontier.time) < 0).all()
        assert frontier.gap == (np.inf if frontier.fixed_nodes else 0.0)


def line(nodes: int, strategies: int, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    return Problem(
        tuple(random.random(strategies) for _ in range(nodes)),
        tuple(Edge(node, node + 1, random.random((strategies, strategies))) for node in range(nodes - 1)),
        tuple(random.integers(1, 50, strategies).astype(float) for _ in range(nodes)),
        ((0, 1),) * nodes,
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_long_line(method: str) -> None:
    """Dynamic programming over every amount of memory, kept apart, says the same."""
    problem = line(30, 4)
    assert problem.usages is not None
    best: dict[tuple[int, float], float] = {
        (choice, problem.usages[0][choice]): problem.costs[0][choice] for choice in range(4)
    }
    for node, edge in enumerate(problem.edges, 1):
        onward: dict[tuple[int, float], float] = {}
        for (before, memory), time in best.items():
            for choice in range(4):
                key = choice, memory + problem.usages[node][choice]
                total = time + edge.costs[before, choice] + problem.costs[node][choice]
                onward[key] = min(onward.get(key, np.inf), total)
        best = onward
    kept: list[tuple[float, float]] = []
    for memory, time in sorted((memory, time) for (_, memory), time in best.items()):
        if not kept or time < kept[-1][1] - 1e-12:
            kept.append((memory, time))
    result = points_of(cost_frontier(problem, method=method))  # type: ignore[arg-type]
    assert [memory for memory, _ in result] == [memory for memory, _ in kept]
    assert [time for _, time in result] == pytest.approx([time for _, time in kept], rel=1e-12)


def test_layers_are_solved_alike_by_both_methods() -> None:
    problem = layered_problem(2, per_layer=20, strategies=3)
    whole = {id(edge.costs): np.round(100 * edge.costs) for edge in problem.edges}  # sums without rounding
    edges = tuple(Edge(edge.source, edge.target, whole[id(edge.costs)]) for edge in problem.edges)
    problem = Problem(tuple(np.round(100 * costs) for costs in problem.costs), edges)
    random = np.random.default_rng(0)
    usages = tuple(random.integers(0, 20, 3).astype(float) for _ in problem.costs)
    problem = Problem(problem.costs, problem.edges, usages, ((0, 1),) * problem.size)
    alone, other = (
        cost_frontier(problem, **options)  # type: ignore[arg-type]
        for options in ({}, {"method": "elimination"})
    )
    assert alone.memory.tolist() == other.memory.tolist()
    assert alone.time.tolist() == other.time.tolist()
    check_assignments(problem, alone)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "guess"}, "method='guess' finds no frontier"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"limit": 0}, "limit=0"),
        ({"edge_usages": [np.zeros((2, 2))]}, "edge_usages do not fit"),
    ],
)
def test_arguments_are_checked(options: dict[str, object], words: str) -> None:
    with pytest.raises(SolverError, match=words):
        cost_frontier(line(3, 2), **options)  # type: ignore[arg-type]


def test_a_problem_without_usages_has_no_frontier() -> None:
    with pytest.raises(SolverError, match="the problem has no usages"):
        cost_frontier(Problem((np.zeros(2),)))


LIFE = ((0, 1), (0, 1))


def kept_strategies(usage: list[float], table: np.ndarray, edge_usage: np.ndarray | None = None) -> list[list[int]]:
    """The remaining strategies of two nodes, the first with costs 1, 2, 3 and these usages, joined by a table."""
    usages = (np.array(usage), np.array([1.0, 1.0]))
    problem = Problem((np.array([1.0, 2.0, 3.0]), np.array([4.0, 0.0])), (Edge(0, 1, table),), usages, LIFE)
    return [
        strategies.tolist()
        for strategies in undominated_strategies(problem, usages, None if edge_usage is None else [edge_usage])
    ]


def test_a_strategy_that_is_worse_in_both_is_dropped() -> None:
    assert kept_strategies([5, 5, 4], np.zeros((3, 2))) == [[0, 2], [1]]
    assert kept_strategies([3, 5, 4], np.zeros((3, 2))) == [[0], [1]]


def test_what_a_neighbour_may_prefer_stays() -> None:
    assert kept_strategies([1, 1, 1], np.array([[0.0, 9.0], [0.0, 0.0], [0.0, 0.0]]))[0] == [0, 1]


def test_memory_on_edges_counts() -> None:
    edge_usage = np.array([[0.0, 2.0], [0.0, 0.0], [0.0, 2.0]])
    assert kept_strategies([1, 1, 1], np.zeros((3, 2)), edge_usage)[0] == [0, 1]


def test_a_strategy_that_is_forbidden_with_every_neighbour_beats_none() -> None:
    table = np.array([[np.inf, np.inf], [0.0, 0.0], [np.inf, 0.0]])
    assert 1 in kept_strategies([1, 1, 0], table)[0]
    assert 2 in kept_strategies([1, 1, 0], table)[0]


def test_of_equal_strategies_the_first_stays() -> None:
    problem = Problem((np.array([1.0, 1.0]),), (), (np.array([2.0, 2.0]),), LIFE[:1])
    assert problem.usages is not None
    assert [strategies.tolist() for strategies in undominated_strategies(problem, problem.usages, None)] == [[0]]


def test_where_all_is_forbidden_one_is_left() -> None:
    problem = Problem((np.array([np.inf, np.inf]),), (), (np.array([2.0, 2.0]),), LIFE[:1])
    assert problem.usages is not None
    assert [strategies.tolist() for strategies in undominated_strategies(problem, problem.usages, None)] == [[0]]
