"""Rules of operators that make tensors: at their local size, or from the positions that a rank holds."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from autoshard.patterns.lockstep import Lockstep
from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

X = normal(4, 6)

CASES = {
    "zeros": partial(assert_sound, aten.zeros.default, [4, 6], shards="d0 d1"),
    "ones": partial(assert_sound, aten.ones.default, [4, 1], shards="d0"),
    "full": partial(assert_sound, aten.full.default, [12], 2.5, shards="d0"),
    "full of no dims": partial(assert_sound, aten.full.default, [], 2, shards=""),
    "scalar_tensor": partial(assert_sound, aten.scalar_tensor.default, 3.0, shards=""),
    "zeros_like": partial(assert_sound, aten.zeros_like.default, X, shards="dim0 dim1"),
    "full_like": partial(assert_sound, aten.full_like.default, X, 2, shards="dim0 dim1"),
    "new_zeros": partial(assert_sound, aten.new_zeros.default, X, [4, 12, 6], shards="d0 d1 d2 operand1"),
    "new_zeros of equal shape": partial(assert_sound, aten.new_zeros.default, X, [4, 6], shards="d0 d1"),
    "new_ones": partial(assert_sound, aten.new_ones.default, X, [6], shards="d0 operand0 operand1"),
    "new_full": partial(assert_sound, aten.new_full.default, X, [12], 1, shards="d0 operand0 operand1"),
    "arange": partial(assert_sound, aten.arange.default, 12, shards="d0"),
    "arange of numbers": partial(assert_sound, aten.arange.default, 12.0, shards="d0"),
    "arange in half precision": partial(assert_sound, aten.arange.default, 12, dtype=torch.float16, shards="d0"),
    "arange from": partial(assert_sound, aten.arange.start, 3, 15, shards="d0"),
    "arange by steps": partial(assert_sound, aten.arange.start_step, 0, 24, 2, shards="d0"),
    "arange backwards": partial(assert_sound, aten.arange.start_step, 12, 0, -1, shards="d0"),
    "arange by parts": partial(assert_sound, aten.arange.start_step, 0.1, 1.3, 0.1, dtype=torch.float32, shards="d0"),
    "linspace": partial(assert_sound, aten.linspace.default, -3.3, 7, 24, dtype=torch.float64, shards="d0"),
    "linspace of floats": partial(assert_sound, aten.linspace.default, 0, 1, 12, shards="d0"),
    "linspace of integers": partial(assert_sound, aten.linspace.default, 0, 5, 12, dtype=torch.int64, shards=""),
    "linspace of one": partial(assert_sound, aten.linspace.default, 0, 1, 1, shards=""),
    "eye": partial(assert_sound, aten.eye.default, 12, shards="d0 d1"),
    "eye of truths": partial(assert_sound, aten.eye.m, 12, 8, dtype=torch.bool, shards="d0 d1"),
    "tril_indices": partial(assert_sound, aten.tril_indices.default, 4, 4, shards=""),
    "hann_window": partial(assert_sound, aten.hann_window.default, 12, shards=""),
    "logspace": partial(assert_sound, aten.logspace.default, 0, 1, 12, shards=""),
}


@pytest.mark.parametrize("sound", CASES.values(), ids=CASES)
def test_rule_is_sound(sound: partial[None]) -> None:
    sound()


def test_positions_are_counted_exactly_as_by_the_whole() -> None:
    """What a shard counts is bit for bit what it would hold of the whole."""
    whole = torch.arange(0.1, 1.3, 0.1, dtype=torch.float32)
    call, rule = bound(aten.arange.start_step, 0.1, 1.3, 0.1, dtype=torch.float32)
    shards = _on_four(call, rule)
    assert torch.equal(torch.cat(shards), whole)


def _on_four(call: object, rule: object) -> list[torch.Tensor]:
    from autoshard.patterns.local import LocalCall
    from autoshard.patterns.padding import emit_local
    from autoshard.specs.axes import MeshShape

    mesh = MeshShape.of({"x": 4})
    value = emit_local(LocalCall(call, rule, (0,), mesh, Lockstep(mesh), []))  # type: ignore[arg-type]
    return list(value.values)


def test_memory_without_content_is_made_at_its_local_size() -> None:
    for op, args in ((aten.empty_strided.default, ([4, 12], [1, 4])), (aten.empty_permuted.default, ([4, 12], [1, 0]))):
        call, rule = bound(op, *args)
        assert {tuple(shard.shape) for shard in _on_four(call, rule)} == {(1, 12)}


def test_the_shape_of_another_tensor_says_nothing_of_where_a_new_one_lies() -> None:
    _, rule = bound(aten.new_zeros.default, X, [4, 6])
    (apart,) = rule.variants
    assert {factor.name for factor in apart.factors if factor.shardable} == {"d0", "d1", "operand0", "operand1"}


def test_empty_strided_like_another_is_made_at_its_local_size() -> None:
    strided = X.new_empty_strided((4, 12), (1, 4))
    rule = rule_for(call_of(aten.new_empty_strided.default, (X, [4, 12], [1, 4]), {}, strided))
    assert rule is not None
    assert len(rule.indices("d1")) == 1


# Triangles and diagonals: rows and columns that follow from where a rank's stretch begins.

MATRICES = normal(4, 12, 6)


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default])
@pytest.mark.parametrize("diagonal", [-3, 0, 2, 7])
def test_rows_and_columns_may_be_sharded(op: Any, diagonal: int) -> None:
    assert_sound(op, MATRICES, diagonal, shards="d0 d1 d2")


@pytest.mark.parametrize("op", [aten.tril.default, aten.triu.default])
def test_what_is_cut_off_is_zero_whatever_it_was(op: Any) -> None:
    x = normal(12, 12)
    x[3, 5], x[9, 1] = math.nan, math.inf
    assert_sound(op, x, shards="d0 d1")
    assert_sound(op, x > 0, 1, shards="d0 d1")


TRIANGLES = {
    "trace": partial(assert_sound, aten.trace.default, normal(12, 8), shards="d0 d1"),
    "trace of integers": partial(assert_sound, aten.trace.default, torch.arange(24).reshape(4, 6), shards="d0 d1"),
    "diagonal": partial(assert_sound, aten.diagonal.default, normal(12, 4, 6), 1, 2, 1, shards="d0"),
    "diagonal_backward": partial(
        assert_sound, aten.diagonal_backward.default, normal(12, 4), [12, 4, 6], 1, 1, 2, shards="d0"
    ),
    "diagonal_scatter": partial(
        assert_sound, aten.diagonal_scatter.default, normal(12, 4, 6), normal(12, 4), 1, 1, 2, shards="d0"
    ),
    "diag_embed": partial(assert_sound, aten.diag_embed.default, normal(12, 4), 1, 0, 2, shards="d1"),
}


@pytest.mark.parametrize("sound", TRIANGLES.values(), ids=TRIANGLES)
def test_a_triangle_is_sound(sound: partial[None]) -> None:
    sound()


def test_only_stretches_of_rows_and_columns_are_taken() -> None:
    _, rule = bound(aten.tril.default, MATRICES)
    assert [factor.contiguous for factor in rule.factors] == [False, True, True]
