from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.ctc_operator import losses
from tests.patterns.ops.soundness import assert_sound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

TARGETS = torch.arange(36).view(12, 3) % 6 + 1
LENGTHS = (torch.arange(12) % 3 + 6, torch.arange(12) % 3 + 1)


@pytest.mark.parametrize("rows", [True, False])
def test_samples_are_independent_where_each_has_its_own_row(rows: bool) -> None:
    scores = normal(8, 12, 7).log_softmax(-1)
    targets = TARGETS if rows else torch.cat([row[:size] for row, size in zip(TARGETS, LENGTHS[1], strict=True)])
    options = (scores, targets, *LENGTHS, 0, False)
    assert_sound(losses.ctc_loss.default, *options, shards="n" if rows else "")
    assert_sound(losses.ctc_loss_backward.default, normal(12) + 2, *options, shards="n" if rows else "")


class Recognizer(nn.Module):
    """A recurrent layer and the loss of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(6, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scores = self.last(self.layer(x)[0]).log_softmax(-1)
        return nn.functional.ctc_loss(scores, TARGETS, lengths, sizes)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_training_on_a_mesh_is_training_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {"x": torch.randn(8, 12, 6), "lengths": LENGTHS[0], "sizes": LENGTHS[1]}
    torch.manual_seed(1)
    reference = train(Recognizer(), inputs)
    torch.manual_seed(1)
    module = Recognizer()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives
