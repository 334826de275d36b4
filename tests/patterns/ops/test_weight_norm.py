from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize(("shape", "dim", "shards"), [((12, 6, 4), 0, "d1 d2 o"), ((4, 6, 12), 2, "d0 d1 o")])
def test_weight_norm(shape: tuple[int, ...], dim: int, shards: str) -> None:
    v = normal(*shape)
    g = normal(*(size if place == dim else 1 for place, size in enumerate(shape))).abs() + 1
    assert_sound(aten._weight_norm_interface.default, v, g, dim, shards=shards)
    _, lengths = aten._weight_norm_interface(v, g, dim)
    assert_sound(aten._weight_norm_interface_backward.default, v + 1, v, g, lengths, dim, shards=shards)
