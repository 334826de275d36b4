"""Products of groups: every dim may be sharded, the groups and the dim that they lie along included."""

from __future__ import annotations

import pytest
import torch

from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal

DTYPES = [torch.float32, torch.bfloat16]
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
