from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.patterns.ops.halo import Halo, windows_over
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train


@pytest.mark.parametrize(
    ("small", "large", "stride", "before", "reach", "least", "after"),
    [
        (12, 12, 1, 1, 2, 1, 1),  # 3 wide, "same" padding
        (12, 12, 1, 3, 6, 3, 3),  # 7 wide: stretches of three rows at least
        (12, 24, 2, 3, 6, 2, 2),  # of two windows, which are four rows
        (12, 24, 2, 0, 0, 1, -1),  # the last row of a stretch is left out
        (12, 36, 3, 0, 2, 1, 0),  # windows side by side
    ],
)
def test_stretches_are_no_shorter_than_the_halo(
    small: int, large: int, stride: int, before: int, reach: int, least: int, after: int
) -> None:
    windows = windows_over(2, [small], [large], [stride], [before], [reach])
    assert windows.sizes == {"x0": small // least, "m0": least, "e0": stride}
    assert windows.halos == [Halo("x0", 2, before, after)]


@pytest.mark.parametrize(("small", "large", "reach"), [(10, 12, 2), (4, 4, 8), (0, 12, 2)])
def test_dims_that_can_not_be_cut_in_equal_stretches_stay_whole(small: int, large: int, reach: int) -> None:
    assert windows_over(2, [small], [large], [1], [reach // 2], [reach]).halos == []


class Image(nn.Module):
    """Convolutions and pools of one image, all of whose activations are sharded by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, stride=2, padding=1)
        self.back = nn.ConvTranspose2d(5, 3, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def rows(value: torch.Tensor) -> torch.Tensor:
            return autoshard.shard(value, Shard(2))

        x = rows(self.first(rows(x))).relu()
        x = rows(functional.max_pool2d(x, 3, stride=1, padding=1))
        x = rows(self.back(rows(self.second(x))))
        return rows(functional.avg_pool2d(x, 2)).square().mean()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4}])
def test_an_image_sharded_by_rows_trains_as_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    inputs = {"x": torch.randn(1, 1, 16, 6)}
    torch.manual_seed(1)
    reference = train(Image(), inputs)
    torch.manual_seed(1)
    module = Image()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE
    assert trace.collectives.get("all_gather_into_tensor", 0) >= 8  # the halos of four windows, there and back
