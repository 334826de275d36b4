"""The factor view of specs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import (
    Layout,
    Segment,
    canonical,
    is_even,
    local_indices,
    local_shape,
    merge_loops,
    segments_of,
    spec_of,
    true_local_shape,
)
from autoshard.specs.spec import Spec
from tests.specs.strategies import placed_shapes

MESH = MeshShape.of({"dp": 2, "tp": 4})


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("S(0) S(0)", "2@0 4@1 12"),
        ("S(0,f=4) S(0)", "4@1 2@0 12"),
        ("R S(0,f=3)", "3 4@1 8"),
        ("S(0,f=12) S(0,f=3)", "3 4@1 2@0 4"),
        ("S(0,f=3) S(0,f=3)", "3 2@0 4@1 4"),
        ("S(0,f=3) S(0)", None),
        ("R R", "96"),
        ("P(sum) S(0)", "4@1 24"),
    ],
)
def test_loops_of_a_dim(text: str, loops: str | None) -> None:
    if loops is None:
        with pytest.raises(ValueError, match="axis 'tp' of size 4"):
            segments_of((96,), Spec.parse(text), MESH)
    else:
        assert " ".join(map(str, segments_of((96,), Spec.parse(text), MESH)[0])) == loops


@given(placed_shapes())
def test_segments_and_spec_are_inverse(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    assume(is_even(shape, spec, mesh))
    layout = segments_of(shape, spec, mesh)
    partial = {axis: spec[axis].reduce_op for axis in spec.partial_axes}  # type: ignore[attr-defined]
    assert tuple(math.prod(loop.size for loop in loops) for loops in layout) == shape
    assert spec_of(layout, partial, mesh) is canonical(shape, spec, mesh)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MeshShape, Layout]:
    """Two dims, over which the axes of a mesh are dealt out among undistributed loops."""
    mesh = MeshShape.of({"a": 2, "b": 3, "c": 4})
    dims: list[list[Segment]] = [[], []]
    for axis in draw(st.permutations(range(3))):
        dim = dims[draw(st.integers(0, 1))]
        dim += [Segment(draw(st.integers(1, 3))), Segment(mesh.sizes[axis], axis)]
    return mesh, tuple(merge_loops([*dim, Segment(draw(st.integers(1, 3)))]) for dim in dims)


@given(layouts())
def test_every_nest_has_a_spec(case: tuple[MeshShape, Layout]) -> None:
    mesh, layout = case
    shape = tuple(math.prod(loop.size for loop in loops) for loops in layout)
    assert segments_of(shape, spec_of(layout, {}, mesh), mesh) == layout


@given(placed_shapes())
def test_shards_divide_the_tensor(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    held = [local_indices(shape, spec, mesh, coordinate) for coordinate in mesh.coordinates()]
    elements = [element for indices in held for element in itertools.product(*indices)]
    copies = math.prod(size for axis, size in enumerate(mesh.sizes) if axis not in spec.shard_axes)
    assert len(elements) == math.prod(shape) * copies
    assert set(elements) == set(itertools.product(*map(range, shape)))


@given(placed_shapes())
def test_even_shards_have_the_programs_shape(case: tuple[MeshShape, tuple[int, ...], Spec]) -> None:
    mesh, shape, spec = case
    assume(is_even(shape, spec, mesh))
    for coordinate in mesh.coordinates():
        assert true_local_shape(shape, spec, mesh, coordinate) == local_shape(shape, spec, mesh)


@pytest.mark.parametrize(
    ("size", "sizes"), [(7, (2, 2, 2, 1)), (5, (2, 2, 1, 0)), (1, (1, 0, 0, 0)), (6, (2, 2, 2, 0))]
)
def test_uneven_shards_are_padded_to_the_first(size: int, sizes: tuple[int, ...]) -> None:
    spec = Spec.parse("R S(1)")
    assert not is_even((3, size), spec, MESH)
    assert local_shape((3, size), spec, MESH) == (3, sizes[0])
    assert tuple(true_local_shape((3, size), spec, MESH, (0, place))[1] for place in range(4)) == sizes


@pytest.mark.parametrize("text", ["S(0) S(0)", "R S(0,f=3)"])
def test_programs_know_no_uneven_nests(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not divide dim 0 of a tensor of shape \(7,\)"):
        local_shape((7,), Spec.parse(text), MESH)


def test_normal_form() -> None:
    mesh = MeshShape.of({"a": 1, "b": 2})
    assert canonical((4, 4), Spec.parse("S(0) S(-1)"), mesh) is Spec.parse("R S(1)")
    assert canonical((4, 4), Spec.parse("P(sum) P(sum)"), mesh) is Spec.parse("R P(sum)")


def test_an_empty_dim_can_be_sharded() -> None:
    spec = Spec.parse("S(0,f=3) S(1)")
    assert local_shape((0, 8), spec, MESH) == (0, 2)
    assert spec_of(segments_of((0, 8), spec, MESH), {}, MESH) is spec


@pytest.mark.parametrize("text", ["S(2) R", "R S(-3)"])
def test_a_dim_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2 dims"):
        segments_of((4, 4), Spec.parse(text), MESH)


def test_a_spec_of_another_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="1 placements for the 2 axes"):
        segments_of((4, 4), Spec.parse("R"), MESH)
