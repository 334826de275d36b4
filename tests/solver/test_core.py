from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.solver import Problem
from autoshard.solver.core import Core, CoreArrays
from autoshard.solver.presolve import presolve
from tests.solver.problems import small_problems, two_axes, with_memory


def test_every_edge_is_seen_from_both_ends() -> None:
    core = presolve(Core.of(with_memory(two_axes(24, labels=3), 0.3)))
    view = CoreArrays.of(core)
    assert len(view.around) == 2 * len(core.ends) > 0
    seen = set()
    for node in range(core.nodes):
        for place in range(view.nodes[node]["around"], view.nodes[node + 1]["around"]):
            half = view.around[place]
            back, other = view.around[half["reverse"]], int(half["neighbour"])
            assert back["neighbour"] == node
            shape = core.size[node], core.size[other]
            actual = view.table[half["table"] :][: shape[0] * shape[1]].reshape(shape)
            expected = view.table[back["table"] :][: actual.size].reshape(shape[::-1])
            assert (actual == expected.T).all()
            seen.add((node, other))
    for edge, (one, other) in enumerate(core.ends.tolist()):
        assert {(one, other), (other, one)} <= seen
        table = core.table[core.start[edge] : core.start[edge + 1]]
        place = next(
            half
            for half in view.around[view.nodes[one]["around"] : view.nodes[one + 1]["around"]]
            if half["neighbour"] == other
        )
        assert np.array_equal(view.table[place["table"] :][: len(table)], table)


@given(problem=small_problems(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_restricted_core_costs_and_holds_what_the_whole_does(problem: Problem, data: st.DataObject) -> None:
    core = Core.of(problem)
    alive = np.array(data.draw(st.lists(st.booleans(), min_size=len(core.cost), max_size=len(core.cost))))
    alive[core.offset[:-1]] = True
    restricted = core.restrict(alive)
    nodes, strategies = restricted.origins()
    assert (alive.nonzero()[0] == core.offset[nodes] + strategies).all()
    for choice in product(*(range(size) for size in restricted.size)):
        places = np.array(choice, dtype=np.int64)
        whole = restricted.expand(places)
        assert restricted.value(places) == core.value(whole)
        assert np.array_equal(restricted.loads(places), core.loads(whole))
        assert restricted.contract(whole).tolist() == list(choice)


@given(problem=small_problems(memory=False), data=st.data())
@settings(max_examples=40, deadline=None)
def test_the_problem_of_a_core_costs_the_same_in_any_order(problem: Problem, data: st.DataObject) -> None:
    core = Core.of(problem)
    sequence = np.array(data.draw(st.permutations(range(core.nodes))))
    again = core.to_problem(sequence)
    assert all(edge.source < edge.target for edge in again.edges)
    choice = np.array([data.draw(st.integers(0, int(size) - 1)) for size in core.size])
    assert np.isclose(again.cost(choice[sequence].tolist()), problem.cost(choice.tolist())) or not np.isfinite(
        problem.cost(choice.tolist())
    )
