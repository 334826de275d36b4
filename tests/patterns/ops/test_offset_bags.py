from __future__ import annotations

import pytest
import torch

from autoshard.capture.fixed_size_bags import SUM
from autoshard.patterns.registry import call_of, rule_for
from tests.patterns.ops.soundness import assert_sound, aten, normal

INDICES = (torch.arange(36).view(12, 3) * 7) % 11


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(padding: int, mode: int) -> None:
    table, indices, offsets = normal(12, 6), INDICES[:4].flatten(), torch.tensor([0, 3, 3, 9])
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
    table, indices, offsets = normal(12, 6), INDICES[:4].flatten(), torch.tensor([0, 3, 3, 9, 12])
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
    table, indices, offsets = normal(12, 6), INDICES[:4].flatten(), torch.tensor([0, 3, 3, 9])
    kept = aten._embedding_bag(table, indices, offsets)[1:]
    backward = (normal(4, 6), indices, offsets, *kept, 12, True, 0, False, None)
    assert_sound(aten._embedding_bag_backward.default, *backward, shards="d")
    sparse = (normal(4, 6), indices, offsets, *kept, 12, False, 0, True, None)
    assert rule_for(call_of(aten._embedding_bag_backward.default, sparse, {}, table)) is None
