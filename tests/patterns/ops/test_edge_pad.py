from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_dims_that_are_not_padded_may_be_sharded(kind: str, spatial: int) -> None:
    shape = (2, 3, 4, 6, 8)[: 2 + spatial]
    padding = [1, 2, 0, 0, 2, 1][: 2 * spatial]
    free = {1: "d0 d1", 2: "d0 d1 d2", 3: "d0 d1 d3"}[spatial]
    forward, backward = (getattr(aten, f"{kind}_pad{spatial}d{end}").default for end in ("", "_backward"))
    x = normal(*shape)
    assert_sound(forward, x, padding, shards=free)
    assert_sound(backward, forward(x, padding) + 1, x, padding, shards=free)
    assert_sound(forward, x[0], padding, shards=" ".join(f"d{int(name[1]) - 1}" for name in free.split()[1:]))
