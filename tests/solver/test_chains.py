"""One kernel, two layouts: tables that edges share, by classes and as sums, and tables laid out edge by edge."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import Edge, Problem
from autoshard.solver.chains import Chains
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.problem import Blend
from autoshard.solver.trws import Messages


def _problem(seed: int, nodes: int, *, forbidden: float) -> Problem:
    """Edges of few tables, some of them sums.

    One table is wide enough for classes of rows and columns, and two are too large to be laid out twice.
    """
    random = np.random.default_rng(seed)
    size = 5
    tables = [np.where(random.random((size, size)) < forbidden, np.inf, random.random((size, size))) for _ in range(3)]
    wide = random.random((4, 3))[np.ix_(random.integers(0, 4, 100), random.integers(0, 3, size))]
    wide = np.repeat(wide, 20, axis=1)
    pairs = [(int(random.integers(node)), node) for node in range(1, nodes)]
    pairs += [tuple(map(int, random.choice(nodes, 2, replace=False))) for _ in range(3)]
    edges: list[Edge] = []
    for source, target in pairs:
        parts = tuple((float(random.random()) + 0.5, tables[k]) for k in random.choice(3, 2, replace=False))
        edges.append(Edge(source, target, tables[0]) if random.random() < 0.5 else Edge(source, target, Blend(parts)))
    costs = [random.random(size) for _ in range(nodes)] + [random.random(100), random.random(5 * 20)]
    large = [random.random((130, 130)) for _ in range(2)]
    costs += [random.random(130) for _ in range(3)]
    edges += [Edge(nodes, nodes + 1, wide), Edge(nodes + 3, nodes + 2, large[0])]
    edges.append(Edge(nodes + 3, nodes + 4, Blend(((2.0, large[0]), (0.5, large[1])))))
    return Problem(tuple(costs), tuple(edges))


@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from((0.0, 0.1)))
@settings(max_examples=40, deadline=None)
def test_both_layouts_give_the_same_bounds_floors_and_roundings(seed: int, nodes: int, forbidden: float) -> None:
    problem = _problem(seed, nodes, forbidden=forbidden)
    shared = Messages(problem, range(problem.size))
    # The arrays of a core hold every edge's whole table, twice.
    core = Core.of(Problem(problem.costs, tuple(Edge(e.source, e.target, e.costs) for e in problem.edges)))
    chains = Chains(CoreArrays.of(core).graph, core.cost)
    shared.run(1)
    chains.iterate()
    assert not shared.assignment or shared.assignment == tuple(chains.round().tolist())
    shared.run(3)
    for _ in range(1, shared.iterations):
        chains.iterate()
    assert shared.bound == pytest.approx(chains.value, rel=1e-9)
    assert np.concatenate(shared.floors()) == pytest.approx(chains.floors(), rel=1e-9)


@given(st.integers(0, 10**6), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_no_assignment_with_a_strategy_costs_less_than_its_floor(seed: int, nodes: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 4, nodes + 1)
    pairs = [(a, b) for a in range(nodes) for b in range(a) if random.random() < 0.7]
    costs = tuple(random.normal(size=size) for size in sizes)
    problem = Problem(costs, tuple(Edge(a, b, random.normal(size=(sizes[a], sizes[b]))) for a, b in pairs))
    core = Core.of(problem)
    chains = Chains(CoreArrays.of(core).graph, core.cost)
    for _ in range(5):
        chains.iterate()
    floors = chains.floors()
    assert floors.min() >= chains.value - 1e-9
    for choice in product(*(range(size) for size in sizes)):
        assert (floors[core.offset[:-1] + np.array(choice)] <= problem.cost(choice) + 1e-9).all()
