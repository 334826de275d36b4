"""The state graph."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given

from autoshard.reshard.states import (
    Nest,
    ShardLoop,
    State,
    closure,
    extra_nests,
    plain_nests,
    spec_of_state,
    state_graph,
    state_of,
    without_axis,
)
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, is_even, local_indices
from autoshard.specs.spec import Spec
from tests.specs.strategies import blocked_shapes, placed_shapes

MESH = MeshShape.of({"a": 2, "b": 4})


def nest(*loops: tuple[int, ...]) -> Nest:
    return tuple(ShardLoop(*loop) for loop in loops)


@given(placed_shapes())
def test_state_and_spec_are_inverse(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    state = state_of(shape, spec, mesh)
    assume(state is not None)
    assert state is not None
    assert spec_of_state(state, shape, mesh) is canonical(shape, spec, mesh)


@given(blocked_shapes())
def test_blocks_are_states(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    state = state_of(shape, spec, mesh)
    assert state is not None
    assert spec_of_state(state, shape, mesh) is spec


@given(placed_shapes())
def test_every_even_spec_is_a_state(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    assume(is_even(shape, spec, mesh))
    assert state_of(shape, spec, mesh) is not None


@pytest.mark.parametrize("text", ["P(sum) P(max)", "P(product) P(sum)", "P(bxor) R"])
def test_reductions_whose_order_matters_are_no_state(text: str) -> None:
    assert state_of((8,), Spec.parse(text), MESH) is None


@given(placed_shapes())
def test_an_all_gather_puts_a_line_of_ranks_together(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    state = state_of(shape, spec, mesh)
    assume(state is not None and is_even(shape, spec, mesh))
    assert state is not None
    for axis in spec.shard_axes:
        nests = tuple(without_axis(nest, axis, mesh) for nest in state.nests)
        gathered = spec_of_state(State(nests, state.partial), shape, mesh)
        for coordinate, dim in itertools.product(mesh.coordinates(), range(len(shape))):
            line = [(*coordinate[:axis], place, *coordinate[axis + 1 :]) for place in range(mesh.sizes[axis])]
            parts = set().union(*(local_indices(shape, spec, mesh, place)[dim] for place in line))
            assert list(local_indices(shape, gathered, mesh, coordinate)[dim]) == sorted(parts)


def test_an_all_gather_leaves_the_loops_below_where_they_are() -> None:
    assert without_axis(nest((0, 1), (1, 3)), 0, MESH) == nest((1, 6))
    assert without_axis(nest((0, 1), (1, 3)), 1, MESH) == nest((0, 1))
    assert closure([nest((0, 1), (1, 1))], MESH) == {(), nest((0, 1)), nest((1, 2)), nest((0, 1), (1, 1))}


def test_an_all_gather_of_blocks_leaves_the_true_loop_above_others() -> None:
    """Six steps in blocks of two: below them, two steps before the gather and six after it."""
    assert without_axis(nest((1, 1, 1, 3), (0, 2)), 1, MESH) == nest((0, 6))
    assert without_axis(nest((0, 1), (1, 2, 1, 3)), 0, MESH) == nest((1, 4, 1, 3))


def test_plain_nests_divide_the_dim() -> None:
    assert plain_nests(3, MESH) == {()}
    assert plain_nests(6, MESH) == {(), nest((0, 1))}
    assert plain_nests(4, MESH) == {(), nest((0, 1)), nest((1, 1))}
    both = {nest((0, 1), (1, 1)), nest((1, 1), (0, 1)), nest((0, 4)), nest((1, 2))}
    assert both < plain_nests(24, MESH)


def test_nests_below_one_loop_come_together() -> None:
    assert extra_nests(nest((0, 4)), 24, MESH) == frozenset()
    below_three = extra_nests(nest((0, 3)), 24, MESH)
    assert {nest((1, 3)), nest((0, 3), (1, 3)), nest((0, 12))} < below_three
    assert extra_nests(nest((0, 12)), 24, MESH) == extra_nests(nest((1, 3), (0, 3)), 24, MESH) == below_three
    assert extra_nests(nest((0, 1), (1, 3)), 24, MESH) == closure([nest((0, 1), (1, 3))], MESH)
    assert extra_nests(nest((1, 1, 2, 7)), 7, MESH) == {(), nest((1, 1, 2, 7))}


def test_every_edge_is_one_collective_over_one_axis() -> None:
    nests = (plain_nests(16, MESH), plain_nests(8, MESH))
    graph = state_graph(nests, frozenset({"sum"}), MESH)
    assert len(graph.index) == len(graph.states)
    specs = [spec_of_state(state, (16, 8), MESH) for state in graph.states]
    assert len(set(specs)) == len(specs)
    pairs = set(zip(graph.source.tolist(), graph.target.tolist(), strict=True))
    assert len(pairs) == len(graph.source)
    for source, target, axis in zip(graph.source, graph.target, graph.axis, strict=True):
        before, after = graph.states[source], graph.states[target]
        for state, other in itertools.product((before, after), range(MESH.ndim)):
            assert state.place(other) is None or state.partial[other] is None
        gathered = [tuple(without_axis(nest, int(axis), MESH) for nest in state.nests) for state in (before, after)]
        assert gathered[0] == gathered[1]


def test_a_shard_never_becomes_partial() -> None:
    graph = state_graph((plain_nests(8, MESH),), frozenset({"sum"}), MESH)
    for source, target, axis in zip(graph.source, graph.target, graph.axis, strict=True):
        assert not (graph.states[source].place(int(axis)) and graph.states[target].partial[axis])


def test_meshes_of_many_axes_have_few_states() -> None:
    mesh = MeshShape.of({"a": 2, "b": 2, "c": 2, "d": 2})
    graph = state_graph((plain_nests(64, mesh),) * 3, frozenset({"sum"}), mesh)
    assert len(graph.states) < 2000
