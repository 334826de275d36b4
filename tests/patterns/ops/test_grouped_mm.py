"""Products of groups: every dim may be sharded, the groups and the dim that they lie along included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

DTYPES = [torch.float32, torch.bfloat16]
# Products of groups in eight bits, against a reference: the kernel is of GPUs alone.

ENDS = torch.tensor([5, 5, 17, 24], dtype=torch.int32)  # the second group is empty
ALL = "g i k j"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ends", [ENDS, ENDS.flip(0).cumsum(0, dtype=torch.int32).clamp(max=24)])
def test_groups_of_rows(dtype: torch.dtype, ends: torch.Tensor) -> None:
    rows = normal(24, 64).to(dtype)
    assert_sound(aten._grouped_mm.default, rows, normal(4, 64, 32).to(dtype), ends, shards=ALL)
    assert_sound(aten._grouped_mm.default, rows, normal(4, 32, 64).to(dtype).transpose(1, 2), ends, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_the_contracted_dim(dtype: torch.dtype) -> None:
    """The gradient of the groups' matrices."""
    assert_sound(aten._grouped_mm.default, normal(24, 64).to(dtype).t(), normal(24, 32).to(dtype), ENDS, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_columns(dtype: torch.dtype) -> None:
    args = (normal(4, 16, 32).to(dtype), normal(24, 32).to(dtype).t(), ENDS)
    assert_sound(aten._grouped_mm.default, *args, shards=ALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch(dtype: torch.dtype) -> None:
    args = (normal(4, 16, 32).to(dtype), normal(4, 24, 32).to(dtype).transpose(1, 2))
    assert_sound(aten._grouped_mm.default, *args, shards=ALL)


def test_rows_are_split_where_they_stay_aligned() -> None:
    _, rule = bound(aten._grouped_mm.default, normal(24, 64).bfloat16(), normal(4, 64, 32).bfloat16(), ENDS)
    sizes = {factor.name: factor.size for factor in rule.factors if factor.shardable}
    assert sizes == {"g": 4, "i": 24, "k": 64 // 8, "j": 32 // 8}


def test_a_bias_has_no_rule() -> None:
    args = (normal(24, 64), normal(4, 64, 32), ENDS, normal(4, 32))
    assert rule_for(call_of(aten._grouped_mm.default, args, {}, normal(24, 32))) is None


OP = aten._scaled_grouped_mm.default


@pytest.fixture(autouse=True)
def _kernel() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_grouped_mm", _reference, "CPU")
        yield


def _reference(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """The products of the scaled matrices, with what the kernel asks for as asserts; zeros where no group reaches."""
    assert left.stride(-1) == 1, "the first matrix lies by rows"
    assert right.stride(-2) == 1 or right.shape[-1] == 1, "the second matrix lies by columns"
    assert left.shape[-1] % 16 == 0, "rows are of whole units"
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    dtype = out_dtype or torch.bfloat16
    a, b = left.double(), right.double()
    if offs is None:
        return (a * scale_a[..., None] @ (b * scale_b[:, None, :])).to(dtype)
    ends = [0, *offs.tolist()]
    stretches = [slice(start, end) for start, end in pairwise(ends)]
    if left.dim() == right.dim() == 2:
        scales = scale_a.view(len(stretches), -1, 1), scale_b.view(len(stretches), 1, -1)
        products = [a[:, one] @ b[one] * scales[0][g] * scales[1][g] for g, one in enumerate(stretches)]
        return torch.stack(products).to(dtype)
    if left.dim() == 2:
        result = a.new_zeros(left.shape[0], right.shape[2])
        for g, one in enumerate(stretches):
            result[one] = a[one] * scale_a[one, None] @ (b[g] * scale_b[g])
        return result.to(dtype)
    result = a.new_zeros(left.shape[1], right.shape[1])
    for g, one in enumerate(stretches):
        result[:, one] = a[g] * scale_a[g][:, None] @ (b[:, one] * scale_b[one])
    return result.to(dtype)


def _eight_bits(*shape: int) -> Tensor:
    return normal(*shape).to(torch.float8_e4m3fn)


def _scale(*shape: int) -> Tensor:
    return normal(*shape).abs().float() + 0.5


def _by_columns(groups: int, columns: int) -> Tensor:
    return _eight_bits(groups, columns, 64).transpose(1, 2)


def test_scaled_groups_of_rows() -> None:
    args = (_eight_bits(24, 64), _by_columns(4, 64), _scale(24), _scale(4, 64), ENDS)
    assert_sound(OP, *args, shards="i j")


def test_scaled_groups_of_columns() -> None:
    args = (_eight_bits(4, 24, 64), _eight_bits(48, 64).t(), _scale(4, 24), _scale(48), 2 * ENDS)
    assert_sound(OP, *args, shards="i j")


def test_scaled_groups_of_the_contracted_dim() -> None:
    """The gradient of the groups' matrices: every group has scales of its own for all rows and columns."""
    ends = 16 * torch.tensor([1, 1, 3, 4], dtype=torch.int32)
    args = (_eight_bits(24, 64), _eight_bits(48, 64).t(), _scale(96), _scale(192), ends)
    assert_sound(OP, *args, shards="i j")


def test_scaled_a_batch() -> None:
    args = (_eight_bits(4, 24, 64), _by_columns(4, 48), _scale(4, 24), _scale(4, 48))
    assert_sound(OP, *args, shards="g i j")


def test_a_bias_and_scales_of_blocks_have_no_rule() -> None:
    result = normal(24, 64).bfloat16()
    args = (_eight_bits(24, 64), _by_columns(4, 64), _scale(24), _scale(4, 64), ENDS)
    assert rule_for(call_of(OP, (*args, normal(64)), {}, result)) is None
    blocks = (*args[:2], _scale(24, 2), _scale(4, 2, 64), ENDS)
    assert rule_for(call_of(OP, blocks, {}, result)) is None
