"""Gradients for outputs in a joint graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture.joint import capture
from autoshard.errors import CaptureError


class _Scores(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.body, self.head, self.in_place = nn.Linear(4, 4), nn.Linear(4, 2), in_place

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        if self.in_place:
            features += 1
        return self.head(features), features


def test_the_graph_has_gradients_for_outputs_alone() -> None:
    graph = capture(_Scores(False), (torch.randn(3, 4),), {}, tangents=("output[1]",))
    assert set(graph.gradients) == {"tap of output[1]"}
    assert graph.gradient_sources == {"tap of output[1]": {"output[0]"}}


def test_an_output_that_is_changed_in_place_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"changes the memory of output\[1\] in place, at .*features \+= 1"):
        capture(_Scores(True), (torch.randn(3, 4),), {}, tangents=("output[1]",))
