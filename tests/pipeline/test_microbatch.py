"""Batches split into microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.pipeline.graph.microbatch import BatchCall


class _Model(nn.Module):
    def forward(self, x: torch.Tensor, batch: dict[str, Any], *, scale: float = 1.0) -> torch.Tensor:
        raise AssertionError("splitting runs nothing")


def test_tensors_are_split_along_the_batch() -> None:
    x, y, table = torch.randn(6, 2), torch.randn(3, 6), torch.randn(4)
    call = ((x, {"y": y, "table": table, "step": torch.tensor(1)}), {"scale": 2.0})
    parts = BatchCall(_Model(), *call, {"batch['y']": 1, "batch['table']": None}).split(3)
    assert len(parts) == 3
    assert torch.equal(torch.cat([part.args[0] for part in parts]), x)
    assert torch.equal(torch.cat([part.args[1]["y"] for part in parts], 1), y)
    for part in parts:
        assert part.args[1]["table"] is table
        assert part.args[1]["step"].item() == 1
        assert part.kwargs == {"scale": 2.0}


def test_meta_tensors_are_split() -> None:
    first, *others = BatchCall(_Model(), (torch.empty(8, 2, device="meta"), {}), {}).split(4)
    assert first.args[0].shape == (2, 2)
    assert first.args[0].is_meta
    assert len(others) == 3


@pytest.mark.parametrize(
    ("sizes", "number", "dims", "said"),
    [
        ((12, 12), 5, {}, r"12 samples cannot be split into 5 .*: use 1, 2, 3, 4, 6 or 12"),
        ((12, 7), 3, {}, r"x has 12 samples \(dim 0\), batch\['y'\] has 7 .*\{\"batch\['y'\]\": None\}"),
        ((12, 12), 0, {}, "0 is no number of microbatches"),
        ((12, 12), 2, {"z": 0}, r"batch_dims names 'z', .*: x, batch\['y'\]"),
        ((12, 12), 2, {"x": 1}, r"batch_dims\['x'\] is 1, and the tensor has 1 dims"),
        ((12, 12), 2, {"x": None, "batch['y']": None}, "no tensor with a batch to split in 2"),
    ],
)
def test_what_cannot_be_split_is_refused(
    sizes: tuple[int, int], number: int, dims: dict[str, int | None], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        BatchCall(_Model(), (torch.zeros(sizes[0]), {"y": torch.zeros(sizes[1])}), {}, dims).split(number)
