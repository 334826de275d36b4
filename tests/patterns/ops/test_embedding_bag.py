from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.fixed_size_bags import MEAN, SUM, bags
from tests.patterns.ops.soundness import assert_sound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

INDICES = (torch.arange(36).view(12, 3) * 7) % 11
INDICES[2] = 3


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize(("mode", "weighted"), [(SUM, False), (SUM, True), (MEAN, False)])
def test_bags_of_one_size(padding: int, mode: int, weighted: bool) -> None:
    table, weights, gradient = normal(12, 6), normal(12, 3) if weighted else None, normal(12, 6) + 1
    assert_sound(bags.bags.default, table, INDICES, weights, mode, padding, shards="b d v")
    assert_sound(bags.bags_backward.default, gradient, INDICES, weights, 12, mode, padding, shards="b d v")
    if weighted:
        assert_sound(bags.bags_weights_backward.default, gradient, table, INDICES, mode, padding, shards="b d v")


class Reader(nn.Module):
    """Bags of all kinds, read by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(24, 6, mode="sum", padding_idx=2), nn.EmbeddingBag(24, 6)
        self.maxima, self.joined = nn.EmbeddingBag(24, 6, mode="max"), nn.EmbeddingBag(24, 6, mode="mean")
        self.weights, self.last = nn.Parameter(torch.rand(8, 3)), nn.Linear(24, 5)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        parts = [self.sums(words, per_sample_weights=self.weights), self.means(words), self.maxima(words)]
        parts.append(self.joined(words.flatten(), offsets))
        return self.last(torch.cat(parts, -1)).square().mean()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_training_on_a_mesh_is_training_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {"words": torch.randint(0, 24, (8, 3)), "offsets": torch.tensor([0, 3, 3, 9, 12, 15, 18, 23])}
    torch.manual_seed(1)
    reference = train(Reader(), inputs)
    torch.manual_seed(1)
    module = Reader()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives
