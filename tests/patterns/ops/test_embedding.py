"""Rules of embeddings and of bags of embeddings, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.operators.bags import MEAN, SUM, bags
from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

INDICES = torch.tensor([[3, 0, 11, 5, 3, 3], [1, 2, 10, 9, 8, 7], [6, 6, 6, 4, 0, 11], [3, 2, 1, 0, 5, 6]])


def test_forward() -> None:
    assert_sound(aten.embedding.default, normal(12, 6), INDICES, shards="v d dim0 dim1")
    assert_sound(aten.embedding.default, normal(12, 6), torch.tensor(7))


def test_rows_of_other_ranks_do_not_leak() -> None:
    table = normal(12, 6)
    table[0] = torch.inf  # looked up in place of rows that lie elsewhere, if anything is
    assert_sound(aten.embedding.default, table, torch.tensor([3, 7, 11, 5]))


@pytest.mark.parametrize("padding", [-1, 3])
def test_backward(padding: int) -> None:
    op, gradient = aten.embedding_dense_backward.default, normal(4, 6, 6)
    assert_sound(op, gradient, INDICES, 12, padding, False, shards="v d dim0 dim1")
    assert_sound(op, gradient, INDICES, 12, padding, True, shards="d")


def test_vocabulary_is_taken_in_whole_stretches() -> None:
    for rule in (
        bound(aten.embedding.default, normal(12, 6), INDICES)[1],
        bound(aten.embedding_dense_backward.default, normal(4, 6, 6), INDICES, 12, -1, False)[1],
    ):
        assert [factor.name for factor in rule.factors if factor.contiguous] == ["v"]


BAGS = (torch.arange(36).view(12, 3) * 7) % 11
BAGS[2] = 3


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize(("mode", "weighted"), [(SUM, False), (SUM, True), (MEAN, False)])
def test_bags_of_one_size(padding: int, mode: int, weighted: bool) -> None:
    table, weights, gradient = normal(12, 6), normal(12, 3) if weighted else None, normal(12, 6) + 1
    assert_sound(bags.bags.default, table, BAGS, weights, mode, padding, shards="b d v")
    assert_sound(bags.bags_backward.default, gradient, BAGS, weights, 12, mode, padding, shards="b d v")
    if weighted:
        assert_sound(bags.bags_weights_backward.default, gradient, table, BAGS, mode, padding, shards="b d v")


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


ROW_NUMBERS = (torch.arange(36).view(12, 3) * 7) % 11


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(padding: int, mode: int) -> None:
    table, indices, offsets = normal(12, 6), ROW_NUMBERS[:4].flatten(), torch.tensor([0, 3, 3, 9])
    weights = normal(12) if mode == SUM else None
    shards = "d" if mode == 2 else "d v"
    forward, settings = aten._embedding_bag.default, (False, mode, False)
    kept = forward(table, indices, offsets, *settings, weights, False, padding)[1:]
    assert_sound(forward, table, indices, offsets, *settings, weights, False, padding, shards=shards)
    backward = (normal(4, 6) + 1, indices, offsets, *kept, 12, *settings, weights, padding)
    assert_sound(aten._embedding_bag_backward.default, *backward, shards=shards)
    if mode == SUM:
        args = (normal(4, 6), table, indices, offsets, kept[0], mode, padding)
        assert_sound(aten._embedding_bag_per_sample_weights_backward.default, *args, shards=shards)


def test_the_last_offset_may_be_given() -> None:
    table, indices, offsets = normal(12, 6), ROW_NUMBERS[:4].flatten(), torch.tensor([0, 3, 3, 9, 12])
    assert_sound(aten._embedding_bag_forward_only.default, table, indices, offsets, False, 1, False, None, True)


def test_empty_bags_and_bags_of_padding_alone() -> None:
    table, indices, offsets = normal(12, 6), torch.tensor([3, 3, 5, 11, 3, 0]), torch.tensor([0, 0, 2, 6])
    for mode in (0, 1):
        args = (table, indices, offsets, False, mode, False, None, False, 3)
        kept = aten._embedding_bag(*args)[1:]
        assert_sound(aten._embedding_bag.default, *args, shards="d v")
        backward = (normal(4, 6) + 1, indices, *kept, 12, False, mode, None, 3)
        assert_sound(aten._embedding_bag_dense_backward.default, *backward, shards="d v")


def test_frequencies_keep_the_vocabulary_whole_and_sparse_gradients_everything() -> None:
    table, indices, offsets = normal(12, 6), ROW_NUMBERS[:4].flatten(), torch.tensor([0, 3, 3, 9])
    kept = aten._embedding_bag(table, indices, offsets)[1:]
    backward = (normal(4, 6), indices, offsets, *kept, 12, True, 0, False, None)
    assert_sound(aten._embedding_bag_backward.default, *backward, shards="d")
    sparse = (normal(4, 6), indices, offsets, *kept, 12, False, 0, True, None)
    assert rule_for(call_of(aten._embedding_bag_backward.default, sparse, {}, table)) is None


# Reductions of segments, against torch.

LENGTHS = torch.tensor([3, 4, 0, 5])
CASES = [
    (normal(12, 6, 4), {"lengths": LENGTHS}, "d0 d1"),
    (normal(12, 6), {"offsets": torch.tensor([0, 3, 7, 12])}, "d0"),
    (normal(6, 12, 4), {"lengths": LENGTHS.expand(6, 4).contiguous(), "axis": 1}, "b0 d0"),
]


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(("data", "segments", "shards"), CASES, ids=["lengths", "offsets", "second dim"])
def test_segments_and_their_gradient(data: torch.Tensor, segments: dict[str, Any], shards: str, reduce: str) -> None:
    initial = {"initial": 1.0} if reduce in ("mean", "max", "min") else {}  # of what is empty
    assert_sound(aten.segment_reduce.default, data, reduce, **segments, **initial, shards=shards)
    output = aten.segment_reduce.default(data, reduce, **segments, **initial)
    gradient = normal(*output.shape)
    backward = aten._segment_reduce_backward.default
    assert_sound(backward, gradient, output, data, reduce, **segments, **initial, shards=shards)


def test_partial_sums_pass_where_nothing_is_added() -> None:
    data, segments, _ = CASES[0]
    for options, linear in (({}, (frozenset({0}),)), ({"initial": 1.0}, ())):
        _, rule = bound(aten.segment_reduce.default, data, "sum", **segments, **options)
        assert rule.linear == linear


def test_segments_by_index_are_left_whole() -> None:
    data, index = normal(12, 6), torch.zeros(12, dtype=torch.int64)
    assert rule_for(call_of(aten.segment_reduce.default, (data, "sum"), {"indices": index}, data)) is None
