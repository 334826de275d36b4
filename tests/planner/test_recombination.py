"""Recombined plans: the cheapest mixture of some assignments within a limit, beside all mixtures."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.planner.planning_problem import BuiltProblem, LiveRange
from autoshard.planner.recombination import recombine
from autoshard.solver import Edge, Problem

MOMENTS = 4


@st.composite
def problems(draw: st.DrawFn) -> BuiltProblem:
    """A problem of a few variables, with memory of single variables and of pairs."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    ends = list(itertools.combinations(range(len(sizes)), 2))
    costs = tuple(generator.random(size) for size in sizes)
    edges = tuple(Edge(source, target, generator.random((sizes[source], sizes[target]))) for source, target in ends)

    def lives(shape: tuple[int, ...]) -> tuple[LiveRange, ...]:
        starts = generator.integers(0, MOMENTS, generator.integers(0, 3))
        return tuple(
            LiveRange(generator.integers(0, 9, shape).astype(float), start, generator.integers(start, MOMENTS + 1))
            for start in starts.tolist()
        )

    return BuiltProblem(
        Problem(costs, edges),
        [],
        live_ranges=[lives((size,)) for size in sizes],
        edge_live_ranges={number: lives(edge.shape) for number, edge in enumerate(edges) if generator.random() < 0.5},
    )


@settings(deadline=None)
@given(built=problems(), data=st.data())
def test_it_is_the_cheapest_mixture_that_fits(built: BuiltProblem, data: st.DataObject) -> None:
    sizes = [len(costs) for costs in built.problem.costs]
    known = data.draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in sizes)), min_size=1, max_size=3))
    besides = np.array(data.draw(st.lists(st.integers(-20, 20), min_size=MOMENTS, max_size=MOMENTS)), dtype=float)
    limit = data.draw(st.integers(0, 50))
    costs = [
        built.problem.cost(mixture)
        for mixture in itertools.product(*(sorted(set(options)) for options in zip(*known, strict=True)))
        if (built.held_bytes(mixture, MOMENTS) + besides).max() <= limit
    ]
    found = recombine(built, known, besides, limit, 10.0)
    if not costs:
        assert found is None
        return
    assert found is not None
    assert all(choice in options for choice, options in zip(found, zip(*known, strict=True), strict=True))
    assert (built.held_bytes(found, MOMENTS) + besides).max() <= limit
    assert math.isclose(built.problem.cost(found), min(costs), rel_tol=1e-3)
