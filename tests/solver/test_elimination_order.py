from __future__ import annotations

from autoshard.solver.core import Core
from autoshard.solver.elimination_order import EliminationGraph, find_order, greedy_order, logarithmic_fill
from tests.solver.problems import layered_problem

CLIQUE = {node: [other for other in range(12) if other != node] for node in range(12)}


def test_the_order_of_a_long_problem_stays_narrow() -> None:
    for layers in (2, 20):
        core = Core.of(layered_problem(layers))
        order = find_order(dict(enumerate(core.size.tolist())), core.neighbours(), 1e9)
        assert len(order.steps) == layers * 110
        assert order.largest <= 6**7


def test_holding_nodes_keeps_every_table_within_the_cap() -> None:
    graph = EliminationGraph(dict.fromkeys(CLIQUE, 6), CLIQUE, 1000)
    order = greedy_order(graph, logarithmic_fill, lambda graph, node: (len(graph.neighbours[node]), -node))
    assert order.largest <= 1000
    assert order.conditioned
    assert sorted([*order.conditioned, *(node for node, _ in order.steps)]) == list(range(12))


def test_a_cap_on_minima_counts_without_the_node() -> None:
    """A star of six strategies a node: its sum has 6**4 entries, the minimum over the middle 6**3."""
    star = {0: [1, 2, 3], 1: [0], 2: [0], 3: [0]}
    last = greedy_order(EliminationGraph(dict.fromkeys(star, 6), star, 6**3, reduced=True), lambda graph, node: (node,))
    assert last.fits
    assert [node for node, _ in last.steps] == [0, 1, 2, 3]
    assert not greedy_order(EliminationGraph(dict.fromkeys(star, 6), star, 6**3), lambda graph, node: (node,)).fits
    assert greedy_order(EliminationGraph(dict.fromkeys(star, 6), star, 6**3), logarithmic_fill).fits
