"""Messages: every bound they give is true, wherever they start, and on trees it is the optimum."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import Edge, Problem
from autoshard.solver.reduced_problem import ReducedProblem
from autoshard.solver.trws import Messages


def _problem(seed: int, nodes: int, extra: int, forbidden: float) -> Problem:
    """A random connected problem; `extra` edges beyond a tree."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, nodes)
    pairs = [(int(random.integers(node)), node) for node in range(1, nodes)]
    pairs += [tuple(map(int, random.choice(nodes, 2, replace=False))) for _ in range(extra)]

    def table(*shape: int) -> np.ndarray:
        values = random.normal(size=shape)
        return np.where(random.random(shape) < forbidden, np.inf, values)

    edges = [Edge(a, b, table(sizes[a], sizes[b])) for a, b in pairs]
    return Problem(costs=tuple(table(size) for size in sizes), edges=tuple(edges))


def _all(problem: Problem) -> dict[tuple[int, ...], float]:
    every = itertools.product(*(range(len(vector)) for vector in problem.costs))
    return {assignment: problem.cost(assignment) for assignment in every}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(0, 4), st.sampled_from((0.0, 0.15)))
def test_no_assignment_costs_less_than_the_bound(seed: int, nodes: int, extra: int, forbidden: float) -> None:
    problem = _problem(seed, nodes, extra, forbidden)
    order = np.random.default_rng(seed).random(nodes)
    messages = Messages(problem, list(order))
    result = messages.run(20)
    costs = _all(problem)
    assert result.bound <= min(costs.values()) + 1e-9
    if result.assignment:
        assert costs[result.assignment] == result.cost


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7))
def test_a_tree_is_solved(seed: int, nodes: int) -> None:
    problem = _problem(seed, nodes, 0, 0.0)
    result = Messages(problem, range(nodes)).run(60)
    best = min(_all(problem).values())
    assert abs(result.bound - best) < 1e-8
    assert abs(result.cost - best) < 1e-8


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 6), st.integers(0, 3))
def test_messages_from_anywhere_give_a_true_bound(seed: int, nodes: int, extra: int) -> None:
    problem = _problem(seed, nodes, extra, 0.0)
    random = np.random.default_rng(seed + 1)
    messages = Messages(problem, range(nodes))
    messages.start_from(
        [random.normal(size=len(problem.costs[edge.target])) for edge in problem.edges],
        [random.normal(size=len(problem.costs[edge.source])) for edge in problem.edges],
    )
    assert messages.run(1).bound <= min(_all(problem).values()) + 1e-9


def test_going_on_from_messages_found_before_begins_at_their_bound() -> None:
    problem = _problem(3, 6, 3, 0.0)
    before = Messages(problem, range(6))
    reached = before.run(30).bound
    after = Messages(problem, range(6))
    after.start_from(before.along, before.against)
    assert after.run(1).bound >= reached - 1e-9


def test_the_bound_never_falls_and_ends_at_a_known_cost() -> None:
    problem = _problem(5, 6, 4, 0.0)
    reported: list[tuple[float, float]] = []
    result = Messages(problem, range(6)).run(50, progress=lambda cost, bound: reported.append((cost, bound)))
    bounds = [bound for _, bound in reported]
    assert bounds == sorted(bounds)
    assert result.bound <= result.cost + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(0, 4), st.integers(1, 6), st.floats(0.0, 2.0))
def test_strategies_that_are_not_near_cost_more(seed: int, nodes: int, extra: int, passes: int, slack: float) -> None:
    problem = _problem(seed, nodes, extra, 0.1)
    messages = Messages(problem, list(np.random.default_rng(seed).random(nodes)))
    bound = messages.run(passes).bound
    messages.iterate()
    kept = messages.strategies_within(slack)
    for assignment, cost in _all(problem).items():
        if cost <= bound + slack - 1e-9:
            assert all(choice in some for choice, some in zip(assignment, kept, strict=True))
    left = ReducedProblem.of(problem, range(nodes)).restrict(kept)
    places = [len(some) - 1 for some in kept]
    assert left.problem.cost(places) == problem.cost(left.solution(places))
