from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings

from autoshard.solver import Edge, Problem
from autoshard.solver.network import Network, fold, reduce
from autoshard.solver.tables import Tables
from tests.solver.problems import brute_force, layered_problem, small_problems


def optimum(network: Network) -> float:
    """By trying every assignment of what is left."""
    nodes = list(network.labels)
    every = product(*(network.labels[node].tolist() for node in nodes))
    return min(network.value(dict(zip(nodes, choice, strict=True))) for choice in every)


@given(problem=small_problems(memory=False))
@settings(max_examples=150, deadline=None)
def test_reductions_keep_the_optimum(problem: Problem) -> None:
    best = brute_force(problem)
    whole = Network.of(problem, Tables())
    for core in (reduce(whole.copy()), reduce(whole.copy(), dominance=False), fold(whole.copy())):
        if not core.feasible:
            assert best == np.inf
            continue
        assert np.isclose(optimum(core), best) or (optimum(core) == best == np.inf)
        choices = core.expand({node: int(labels[0]) for node, labels in core.labels.items()})
        value = core.value(choices)
        if np.isfinite(value):
            complete = problem.cost([choices[node] for node in range(problem.size)])
            assert complete <= value + 1e-9


@given(problem=small_problems())
@settings(max_examples=100, deadline=None)
def test_memory_is_kept_by_reductions(problem: Problem) -> None:
    """Some optimum within the limit survives, and what eliminated nodes hold is what they use."""
    best = brute_force(problem)
    core = reduce(Network.of(problem, Tables(), memory=True))
    result = np.inf
    nodes = list(core.labels)
    for choice in product(*(core.labels[node].tolist() for node in nodes)) if core.feasible else ():
        choices = core.expand(dict(zip(nodes, choice, strict=True)))
        for node, held in core.held.items():
            assert problem.usages[node][choices[node]] == held
        complete = [choices[node] for node in range(problem.size)]
        if problem.feasible(complete):
            result = min(result, problem.cost(complete))
    assert result == best


def test_chains_and_trees_vanish() -> None:
    random = np.random.default_rng(0)
    chain = Problem((random.random(4),) * 30, tuple(Edge(n - 1, n, random.random((4, 4))) for n in range(1, 30)))
    core = reduce(Network.of(chain, Tables()))
    assert not core.vectors
    assert np.isclose(core.offset, chain.cost([core.expand({})[node] for node in range(30)]))


def test_separable_edges_are_dropped() -> None:
    random = np.random.default_rng(0)
    separable = random.random(5)[:, None] + random.random(5)[None, :]
    pairs = [(a, b) for a in range(6) for b in range(a)]
    problem = Problem(tuple(random.random((6, 5))), tuple(Edge(a, b, separable) for a, b in pairs))
    assert not reduce(Network.of(problem, Tables()), dominance=False).vectors


def test_the_network_given_is_left_alone() -> None:
    network = Network.of(layered_problem(1), Tables())
    before = {node: (id(vector), len(network.edges[node])) for node, vector in network.vectors.items()}
    reduce(network.copy())
    assert before == {node: (id(vector), len(network.edges[node])) for node, vector in network.vectors.items()}


def test_restricting_equals_keeping_node_by_node() -> None:
    network = Network.of(layered_problem(1, per_layer=12), Tables())
    rows = {node: np.array([1, 3]) for node in range(0, 12, 2)}
    kept = network.copy()
    for node, positions in rows.items():
        kept.keep(node, positions)
    assert np.isclose(optimum(reduce(kept)), optimum(reduce(network.restrict(rows))))


def test_equal_tables_are_worked_on_once() -> None:
    tables = Tables()
    first, second = tables.intern(np.eye(3)), tables.intern(np.eye(3))
    assert first is second
    assert tables.add(first, first) is tables.add(second, second)
    assert tables.transpose(tables.transpose(first)) is first
    child = tables.child()
    assert child.intern(np.eye(3)) is first
    assert tables.compute("add", (first, first), lambda: None) is tables.add(first, first)


def test_a_node_that_lost_every_strategy_makes_the_network_infeasible() -> None:
    problem = Problem(costs=(np.zeros(2), np.zeros(2)), edges=(Edge(0, 1, np.eye(2)),))
    nothing = np.array([], dtype=np.intp)
    for rows in ({0: nothing}, {0: nothing, 1: nothing}):
        assert not reduce(Network.of(problem, Tables()).restrict(rows)).feasible
