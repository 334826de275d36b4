"""Inputs that a step changes, and whose memory its program writes to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture.joint import capture
from autoshard.program.split import split
from tests.planner.steps import flow_of, planner_of, program_of

WRITES = (torch.ops.aten.index_copy.default, torch.ops.aten.index_copy_.default)


class Cached(nn.Module):
    """Writes a row of a cache; reads the old one, too, or checks that all numbers are finite, where asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, row: Tensor, cache: Tensor, position: Tensor, more: str) -> Tensor:
        old = cache.sum() if more == "reads" else 0
        row = row * self.scale
        if more == "checks" and not row.isfinite().all():
            raise ValueError("numbers are not finite")
        cache.index_copy_(0, position, row)
        return cache.sum() + old


@pytest.mark.parametrize("more", ["", "reads", "checks"])
def test_rows_are_written_in_place_where_nothing_needs_the_old_ones(more: str) -> None:
    example = (torch.ones(1, 8), torch.zeros(1000, 8), torch.tensor([3]), more)
    planner = planner_of(capture(Cached(), example, {}, grad=False), {"x": 1})
    plan = planner.plan()
    predicted = planner.program(flow_of(planner, plan))
    written = [node.target for node in predicted.forward.graph.nodes if node.target in WRITES]
    assert written == [WRITES[not more]]
    # The cache, and a second one where that is needed.
    bytes_of_cache = example[1].nbytes
    assert plan.memory.peak // bytes_of_cache == (2 if more else 1)
    if more != "checks":
        halves = split(program_of(planner, plan), compile=False, in_place=True)
        assert [node.target for node in halves.forward.graph.nodes if node.target in WRITES] == written
