"""View arithmetic: common factors of two shapes, and local reshapes of strided shards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.patterns.rule import Dims
from autoshard.patterns.soundness import check
from autoshard.patterns.view_factors import factor_view

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("source", "target", "sizes"),
    [
        ((2, 5, 84), (2, 5, 3, 4, 7), (2, 5, 3, 4, 7)),
        ((4, 4), (16,), (4, 4)),
        ((12, 5), (4, 15), (4, 3, 5)),
        ((1, 4, 1), (2, 2), (2, 2)),
        ((), (1, 1), ()),
        ((2, 3), (2, 3), (2, 3)),
    ],
)
def test_shapes_that_align(source: Shape, target: Shape, sizes: tuple[int, ...]) -> None:
    view = factor_view(source, target)
    assert view.sizes == sizes
    assert all(view.shardable)


def test_a_fused_projection_has_its_heads_in_the_middle() -> None:
    view = factor_view((2, 84), (2, 3, 4, 7))
    assert view.source == ((0,), (1, 2, 3))
    assert view.target == ((0,), (1,), (2,), (3,))


def test_what_does_not_align_is_not_shardable_but_what_stands_beside_it_is() -> None:
    view = factor_view((6, 10, 8), (4, 15, 8))
    shardable = [size for size, shardable in zip(view.sizes, view.shardable, strict=True) if shardable]
    assert sorted(shardable) == [2, 5, 8]


def test_alignment_goes_on_behind_a_place_that_does_not_align() -> None:
    view = factor_view((3, 2, 5, 4), (2, 3, 20))
    assert [size for size, shardable in zip(view.sizes, view.shardable, strict=True) if shardable] == [5, 4]


def test_tensors_without_elements_align_in_their_leading_equal_dims() -> None:
    view = factor_view((4, 0), (4, 0, 5))
    assert view.source == ((0,), (1,))
    assert view.target == ((0,), (1,), (2,))
    assert view.shardable == (True, True, False)


@st.composite
def _views(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of one tensor: the same small numbers in two orders, multiplied together in runs."""
    numbers = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    return draw(_grouped(numbers)), draw(_grouped(draw(st.one_of(st.just(numbers), st.permutations(numbers)))))


@st.composite
def _grouped(draw: st.DrawFn, numbers: list[int]) -> Shape:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(numbers) - 1)))))
    bounds = [0, *(cut for cut in cuts if cut < len(numbers)), len(numbers)]
    return tuple(math.prod(numbers[low:high]) for low, high in itertools.pairwise(bounds))


def _products(dims: Dims, sizes: tuple[int, ...]) -> Shape:
    return tuple(math.prod(sizes[factor] for factor in dim) for dim in dims)


@given(_views())
def test_factors_multiply_to_both_shapes_in_the_same_order(shapes: tuple[Shape, Shape]) -> None:
    source, target = shapes
    view = factor_view(source, target)
    assert _products(view.source, view.sizes) == source
    assert _products(view.target, view.sizes) == target
    common = [
        [factor for dim in dims for factor in dim if view.shardable[factor]] for dims in (view.source, view.target)
    ]
    assert common[0] == common[1]
    assert 1 not in view.sizes


@given(_views())
@settings(max_examples=50)
def test_a_shard_reshaped_is_the_shard_of_the_reshaped(shapes: tuple[Shape, Shape]) -> None:
    source, target = shapes
    whole = torch.arange(float(math.prod(source)), dtype=torch.float64).reshape(source)
    assert check(torch.ops.aten.view.default, (whole, list(target)), sizes=(2, 3, 4, 5)) == []


@given(_views())
def test_the_way_back_has_the_same_factors(shapes: tuple[Shape, Shape]) -> None:
    there, back = factor_view(*shapes), factor_view(*reversed(shapes))
    sizes = [
        sorted(size for size, shardable in zip(view.sizes, view.shardable, strict=True) if shardable)
        for view in (there, back)
    ]
    assert sizes[0] == sizes[1]
