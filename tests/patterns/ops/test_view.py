"""Rules of views against the operators themselves.

View arithmetic: common factors of two shapes, and local reshapes of strided shards.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.patterns.local import LocalCall
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.patterns.ops.view import factor_view, memory_order, strided_view
from autoshard.patterns.padding import emit_local
from autoshard.patterns.registry import call_of, rule_for
from autoshard.patterns.rule import Dims, Rule, TensorMeta
from autoshard.patterns.soundness import check
from autoshard.patterns.strategy import WHOLE
from autoshard.specs.axes import MeshShape
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _rule(op: Any, *args: Any) -> Rule:
    rule = rule_for(call_of(op, args, {}, op(*args)))
    assert rule is not None
    return rule


CALLS = {
    "view": (aten.view.default, (_x(4, 72), [4, 3, 4, 6])),
    "view of fused dims": (aten.view.default, (_x(4, 3, 4, 6), [12, -1])),
    "view that does not align": (aten.view.default, (_x(6, 4), [4, 6])),
    "view without elements": (aten.view.default, (_x(4, 0), [4, 0, 6])),
    "_unsafe_view": (aten._unsafe_view.default, (_x(24, 6), [4, 6, 6])),
    "reshape of a transpose": (aten.reshape.default, (_x(4, 6, 12).transpose(1, 2), [4, 12, 2, 3])),
    "squeeze": (aten.squeeze.dim, (_x(4, 1, 6), 1)),
    "squeeze of several": (aten.squeeze.dims, (_x(1, 12, 1, 2), [0, 1])),
    "squeeze of all": (aten.squeeze.default, (_x(1, 4, 1, 2),)),
    "unsqueeze": (aten.unsqueeze.default, (_x(4, 6), -1)),
    "expand": (aten.expand.default, (_x(4, 1, 6), [4, 12, -1])),
    "expand to more dims": (aten.expand.default, (_x(4, 1), [6, 4, 12])),
    "repeat": (aten.repeat.default, (_x(4, 6), [2, 1, 6])),
    "permute": (aten.permute.default, (_x(4, 6, 12), [2, 0, -2])),
    "transpose": (aten.transpose.int, (_x(4, 6, 12), 1, -1)),
    "t": (aten.t.default, (_x(4, 6),)),
    "t of a vector": (aten.t.default, (_x(4),)),
    "clone": (aten.clone.default, (_x(4, 6),)),
    "detach": (aten.detach.default, (_x(4, 6),)),
    "cast": (aten._to_copy.default, (_x(4, 6), torch.float32)),
    "view as other numbers": (aten.view.dtype, (_x(4, 6), torch.int64)),
    "view as more numbers": (aten.view.dtype, (_x(4, 6), torch.int32)),
    "roll": (aten.roll.default, (_x(4, 6), [1], [1])),
    "roll of all": (aten.roll.default, (_x(4, 6), [5])),
    "flip": (aten.flip.default, (_x(4, 6), [0])),
    "rot90": (aten.rot90.default, (_x(12, 4, 6), 1, [0, 2])),
    "rot90 upside down": (aten.rot90.default, (_x(12, 4, 6), 2, [0, -1])),
    "view_as_complex": (aten.view_as_complex.default, (_x(12, 2),)),
    "view_as_real": (aten.view_as_real.default, (torch.view_as_complex(_x(12, 2)),)),
}


@pytest.mark.parametrize(("op", "args"), CALLS.values(), ids=CALLS)
def test_rule_is_sound(op: Any, args: tuple[Any, ...]) -> None:
    kwargs = {"dtype": args[-1]} if op == aten._to_copy.default else {}
    assert check(op, args[:1] if kwargs else args, kwargs) == []


def test_view_of_a_fused_projection_makes_heads_a_factor() -> None:
    rule = _rule(aten.view.default, _x(4, 72), [4, 3, 4, 6])
    assert [factor.size for factor in rule.factors] == [4, 3, 4, 6]
    assert rule.operands == (((0,), (1, 2, 3)),)
    assert rule.free


def test_expand_makes_a_factor_that_only_the_result_has() -> None:
    rule = _rule(aten.expand.default, _x(4, 1, 6), [4, 12, 6])
    new = rule.indices("new1")
    assert rule.results == (((rule.indices("d0")[0],), new, (rule.indices("d2")[0],)),)
    assert rule.operands[0][1] == ()


def test_cast_to_integers_is_not_linear() -> None:
    x = _x(4)
    call = call_of(aten._to_copy.default, (x,), {"dtype": torch.int64}, x.long())
    rule = rule_for(call)
    assert rule is not None
    assert rule.linear == ()


# Views that copy, against torch: the factors of the views, and memory of their own.

X = normal(12, 6)


@pytest.mark.parametrize(
    ("name", "shards", "args"),
    [
        ("alias", "dim0 dim1", (X,)),
        ("as_strided", "f0 f1", (X, [6, 12], [1, 6])),
        ("detach", "dim0 dim1", (X,)),
        ("diagonal", "d2", (normal(6, 6, 4), 0, 0, 1)),
        ("expand", "d0 new1", (normal(12, 1), [12, 6])),
        ("narrow", "cut d0", (X, 1, 2, 4)),
        ("permute", "d0 d1 d2", (normal(6, 4, 2), [2, 0, 1])),
        ("select.int", "d0 d1", (X, 1, 2)),
        ("slice.Tensor", "cut d1", (X, 0, 0, 6)),
        ("split.Tensor", "cut d1", (X, 4)),
        ("split_with_sizes", "cut d1", (X, [8, 4])),
        ("squeeze", "d0 d1", (normal(12, 1, 6),)),
        ("squeeze.dim", "d0 d1", (normal(12, 1, 6), 1)),
        ("squeeze.dims", "d0 d1", (normal(12, 1, 6), [1])),
        ("t", "d0 d1", (X,)),
        ("transpose.int", "d0 d1", (X, 0, 1)),
        ("unbind.int", "d0", (X, 1)),
        ("unfold", "d1 window windows", (X, 0, 4, 4)),
        ("unsqueeze", "d0 d1", (X, 1)),
        ("view", "d0 d1 d2", (X, [3, 4, 6])),
        ("view.dtype", "d0 d1", (X, torch.int64)),
        ("view_as_complex", "d0 d1", (normal(12, 6, 2),)),
        ("view_as_real", "d0 d1", (torch.complex(X, X + 1),)),
    ],
)
def test_a_copy_is_split_as_the_view(name: str, shards: str, args: tuple[Any, ...]) -> None:
    view, _, overload = name.partition(".")
    op = getattr(getattr(aten, f"{view}_copy"), overload or "default")
    assert_sound(op, *args, shards=shards)


def test_results_share_no_memory_with_the_operand() -> None:
    mesh = MeshShape.of({"x": 2})
    call, rule = bound(aten.split_copy.Tensor, X, 4)
    results = emit_local(LocalCall(call, rule, (WHOLE,), mesh, Lockstep(mesh), [PerRank((X, X))]))
    memory = {value.untyped_storage().data_ptr() for result in results for value in result.values}
    assert X.untyped_storage().data_ptr() not in memory
    assert len(memory) == len(results) * mesh.size


# Strided views of memory: most are plain views, and all are right however the local tensors lie.

MEMORY = normal(4, 6, 12)
TURNED = MEMORY.transpose(1, 2)  # [4, 12, 6] in the same memory

CASES = {
    "the same": partial(assert_sound, aten.as_strided.default, MEMORY, [4, 6, 12], [72, 12, 1], shards="f0 f1 f2 "),
    "cut in two": partial(
        assert_sound, aten.as_strided.default, MEMORY, [4, 3, 2, 12], [72, 24, 12, 1], shards="f0 f1 f2 f3"
    ),
    "in another order": partial(
        assert_sound, aten.as_strided.default, MEMORY, [12, 4, 6], [1, 72, 12], shards="f0 f1 f2"
    ),
    "of a transpose": partial(assert_sound, aten.as_strided.default, TURNED, [24, 12], [12, 1], shards="f0 f1 f2"),
    "a part": partial(assert_sound, aten.as_strided.default, MEMORY, [4, 6, 4], [72, 12, 1], 5, shards="f0 f1"),
    "every third": partial(assert_sound, aten.as_strided.default, MEMORY, [4, 6, 4], [72, 12, 3], 1, shards="f0 f1 f2"),
    "one row": partial(assert_sound, aten.as_strided.default, MEMORY, [12], [1], 24, shards=""),
    "repeated": partial(
        assert_sound, aten.as_strided.default, MEMORY, [4, 12, 6, 12], [72, 0, 12, 1], shards="f0 f1 f2 repeated1"
    ),
    "with dims of one": partial(
        assert_sound, aten.as_strided.default, MEMORY, [4, 1, 72, 1], [72, 7, 1, 1], shards="f0 f1 f2"
    ),
    "windows that overlap": partial(assert_sound, aten.as_strided.default, normal(12), [5, 4], [2, 1], shards=""),
    "windows of a transpose": partial(assert_sound, aten.as_strided.default, normal(4, 6).t(), [5, 4], [4, 1]),
    "scatter": partial(
        assert_sound,
        aten.as_strided_scatter.default,
        normal(288),
        normal(4, 12, 6),
        [4, 12, 6],
        [72, 1, 12],
        shards="f0 f1 f2",
    ),
    "scatter into a transpose": partial(
        assert_sound, aten.as_strided_scatter.default, TURNED, normal(24, 12), [24, 12], [12, 1], shards="f0 f1 f2"
    ),
    "scatter into a part": partial(
        assert_sound, aten.as_strided_scatter.default, MEMORY, normal(4, 6, 4), [4, 6, 4], [72, 12, 1], 5, shards=""
    ),
    "scatter into a part of a transpose": partial(
        assert_sound, aten.as_strided_scatter.default, TURNED, normal(4, 4), [4, 4], [72, 3], shards=""
    ),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_a_strided_view_is_sound(sound: partial[None]) -> None:
    sound()


def test_order_in_memory() -> None:
    def order(x: torch.Tensor) -> tuple[int, ...] | None:
        return memory_order(TensorMeta(tuple(x.shape), x.dtype, x.stride()))

    assert order(MEMORY) == (0, 1, 2)
    assert order(MEMORY.permute(2, 0, 1)) == (1, 2, 0)
    assert order(MEMORY[:, :, None].transpose(1, 3)) is not None
    assert order(MEMORY[:, ::2]) is None
    assert order(MEMORY[:, :1].expand(4, 6, 12)) is None
    assert memory_order(TensorMeta((4,), torch.float64)) is None


def test_what_is_no_cut_of_memory() -> None:
    assert strided_view(12, (5, 4), (2, 1), 0) is None  # overlapping windows
    assert strided_view(12, (2, 2), (5, 1), 0) is None  # strides that do not divide
    assert strided_view(12, (2, 3), (6, 2), 1) is not None


def test_gaps_in_memory_have_no_rule() -> None:
    x = normal(4, 12)[:, ::2]
    assert rule_for(call_of(aten.as_strided.default, (x, [2], [1]), {}, x.as_strided([2], [1]))) is None


def test_a_view_costs_nothing() -> None:
    assert bound(aten.as_strided.default, MEMORY, [24, 12], [12, 1])[1].free


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
