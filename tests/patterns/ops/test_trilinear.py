from __future__ import annotations

from tests.patterns.ops.soundness import assert_sound, aten, normal


def test_every_dim_is_a_loop() -> None:
    """As `torch.nn.Bilinear` calls it: samples, outputs, and the features of both inputs."""
    left, weight, right = normal(4, 6), normal(8, 6, 12), normal(4, 12)
    assert_sound(aten._trilinear.default, left, weight, right, [1, 3], [0], [1, 2], [2, 3], shards="d0 d1 d2 d3")
