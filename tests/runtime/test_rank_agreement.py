"""What tells one batch from another: numbers of any size are near to themselves, and other ones are not."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.rank_agreement import _is_close, _summary

TENSORS = {
    "numbers": torch.randn(50, generator=torch.Generator().manual_seed(0)),
    "the mask of smallest numbers": torch.full((4, 4), torch.finfo(torch.float32).min).triu(1),
    "the mask of infinities": torch.full((4, 4), -torch.inf).triu(1),
    "the largest doubles": torch.full((8,), torch.finfo(torch.float64).max, dtype=torch.float64),
    "not numbers": torch.tensor([1.0, torch.nan, torch.inf]),
    "zeros": torch.zeros(3, 4),
    "nothing": torch.zeros(0, 4),
    "half": torch.arange(5.0).to(torch.bfloat16),
    "one": torch.tensor(2.5),
    "integers": torch.arange(6),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 1j]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_near_to_itself(name: str) -> None:
    assert _is_close(_summary(TENSORS[name]), _summary(TENSORS[name].clone()))


def test_rounding_is_near_and_another_batch_is_not() -> None:
    batch = TENSORS["numbers"]
    assert _is_close(_summary(batch * (1 + 1e-6)), _summary(batch))
    assert not _is_close(_summary(batch.flip(0)), _summary(batch))
    assert not _is_close(_summary(2 * batch), _summary(batch))
    assert not _is_close(_summary(batch), _summary(torch.zeros(50)))
    assert not _is_close(_summary(torch.zeros(50)), _summary(batch))


def test_masks_of_other_samples_are_told_apart() -> None:
    for name in ("the mask of smallest numbers", "the mask of infinities"):
        assert not _is_close(_summary(TENSORS[name].flip(0)), _summary(TENSORS[name]))
