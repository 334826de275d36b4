"""Components against reachability.

Merging loses no bytes: against every assignment of small graphs whose ends are held in place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.graph.stage_graph import (
    StageGraph,
    StageNode,
    StageValue,
    coarsen,
    strongly_connected_components,
)
from autoshard.pipeline.graph.stage_problem import Assignment, StageDevice, StageProblem
from tests.pipeline.random_graphs import assignments, chain, graphs, node


@given(st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_a_component_is_what_reaches_each_other(nodes: int, data: st.DataObject) -> None:
    ends = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(ends, ends), max_size=16))
    reach = np.eye(nodes, dtype=bool)
    for source, user in edges:
        reach[source, user] = True
    for _ in range(3):  # paths of up to eight edges
        reach = reach @ reach
    found = np.array(strongly_connected_components(nodes, edges))
    assert ((found[:, None] == found) == (reach & reach.T)).all()


@st.composite
def held_at_both_ends(draw: st.DrawFn) -> StageGraph:
    """A random graph between two heavy nodes, too heavy to be merged, that start and end it."""
    inner = draw(graphs(5))
    count = len(inner.nodes)
    heavy = [StageNode(name, 50.0, 50.0, 50, (), (name,)) for name in ("first", "last")]
    light = tuple(replace(one, at_rest=()) for one in inner.nodes)
    nodes = (heavy[0], *light, heavy[1])
    read_first = draw(st.sets(st.integers(1, count), min_size=1))
    values = [StageValue("first", 0, tuple(sorted(read_first)), draw(st.integers(1, 5)))]
    known = {value.source: value for value in inner.values}
    for place in range(count):
        value = known.get(place) or StageValue(f"n{place}", place, (), draw(st.integers(1, 5)))
        users = {user + 1 for user in value.users}
        if not users or draw(st.booleans()):
            users.add(count + 1)
        values.append(replace(value, source=place + 1, users=tuple(sorted(users)), recompute_seconds=None))
    return StageGraph(nodes, tuple(values), {})


def _least(graph: StageGraph, stages: int) -> float:
    """The smallest objective of all assignments from the first stage to the last, whatever the balance."""
    problem = StageProblem(graph, (StageDevice(1.0),) * stages, (1,) * stages, 1e9)
    place = {name: number for number, one in enumerate(graph.nodes) for name in one.members}
    return min(
        problem.totals(Assignment(stage)).objective
        for stage in assignments(graph, stages)
        if stage[place["first"]] == 0 and stage[place["last"]] == stages - 1
    )


@given(held_at_both_ends())
@settings(max_examples=80, deadline=None)
def test_merging_loses_no_bytes(graph: StageGraph) -> None:
    merged = coarsen(graph, 0.4)
    assert {name for one in merged.nodes for name in one.members} == {
        name for one in graph.nodes for name in one.members
    }
    assert merged.seconds == pytest.approx(graph.seconds)
    assert _least(merged, 2) == pytest.approx(_least(graph, 2))


def test_branches_of_a_residual_join_with_it() -> None:
    # A norm, queries, keys and values, attention, and the addition to what went around: a cut inside crosses that too.
    nodes = tuple(node(place, 100.0 if place in (0, 7) else 1.0) for place in range(8))
    edges = [(0, (1, 6)), (1, (2, 3, 4)), (2, (5,)), (3, (5,)), (4, (5,)), (5, (6,)), (6, (7,))]
    sizes = [8, 8, 8, 2, 2, 8, 8]
    values = tuple(
        StageValue(f"n{source}", source, users, size, size) for (source, users), size in zip(edges, sizes, strict=True)
    )
    merged = coarsen(StageGraph(nodes, values, {}), 0.1)
    assert [one.members for one in merged.nodes] == [("n0",), ("n1", "n2", "n3", "n4", "n5", "n6"), ("n7",)]


def test_no_node_grows_beyond_the_grain() -> None:
    merged = coarsen(chain([1.0] * 100, [1] * 99), 0.1)
    assert len(merged.nodes) <= 20
    assert max(one.seconds for one in merged.nodes) <= 10.0 + 1e-9
