"""What stands for the ranks of a mesh in one process."""

from __future__ import annotations

import pytest
import torch

from autoshard.patterns import exchanging  # noqa: F401  # defines an operator
from tests.runtime.meshes import per_rank, simulated_mesh

FUNCTIONAL = torch.ops._c10d_functional


@pytest.mark.parametrize("alike", [True, False])
def test_a_tensor_that_all_ranks_hold_alike_is_exchanged_as_others_are(alike: bool) -> None:
    value = torch.arange(1.0, 5.0)
    with simulated_mesh(a=4) as mesh:
        held, group = value if alike else torch.zeros(4) + value, mesh.get_group(0).group_name
        started = [
            FUNCTIONAL.all_gather_into_tensor(held, 4, group),
            FUNCTIONAL.all_to_all_single(held, [1] * 4, [1] * 4, group),
            FUNCTIONAL.all_reduce(held, "sum", group),
            FUNCTIONAL.reduce_scatter_tensor(held, "sum", 4, group),
            torch.ops.autoshard.shift(held, 1, group),
        ]
        results = [per_rank(FUNCTIONAL.wait_tensor(result), mesh) for result in started]
    for rank in range(4):
        own = value[rank].expand(4)
        for result, expected in zip(results, (value.repeat(4), own, 4 * value, 4 * own[:1], value), strict=True):
            assert torch.equal(result[rank,], expected)
