"""Rules of convolutions, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.patterns.ops.convolution import Halo, windows_over
from tests.patterns.ops.soundness import assert_sound, aten, bound, normal
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

CASES = [  # groups, input channels, output channels, transposed, what may be sharded
    (1, 6, 12, False, "n i o"),
    (4, 12, 24, False, "n g i o"),
    (12, 12, 12, False, "n g"),
    (1, 12, 6, True, "n i o"),
    (4, 12, 24, True, "n g i o"),
]


def _tensors(groups: int, inputs: int, outputs: int, transposed: bool, spatial: int) -> tuple:
    channels = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    settings = ([2] * spatial, [1] * spatial, [1] * spatial, transposed, [0] * spatial, groups)
    return normal(4, inputs, *[5] * spatial), normal(*channels, *[3] * spatial), normal(outputs), settings


@pytest.mark.parametrize(("groups", "inputs", "outputs", "transposed", "shards"), CASES)
def test_forward(groups: int, inputs: int, outputs: int, transposed: bool, shards: str) -> None:
    x, weight, bias, settings = _tensors(groups, inputs, outputs, transposed, 2)
    assert_sound(aten.convolution.default, x, weight, bias, *settings, shards=shards)
    assert_sound(aten.convolution.default, x, weight, None, *settings)


@pytest.mark.parametrize(("groups", "inputs", "outputs", "transposed", "shards"), CASES)
def test_backward(groups: int, inputs: int, outputs: int, transposed: bool, shards: str) -> None:
    x, weight, bias, settings = _tensors(groups, inputs, outputs, transposed, 2)
    gradient = normal(*aten.convolution(x, weight, bias, *settings).shape) + 1
    for mask in ([True, True, True], [False, True, False], [True, False, False], [False, True, True]):
        sizes = [outputs] if mask[2] else None
        assert_sound(aten.convolution_backward.default, gradient, x, weight, sizes, *settings, mask, shards=shards)


@pytest.mark.parametrize("spatial", [1, 3])
def test_other_numbers_of_positions(spatial: int) -> None:
    x, weight, bias, settings = _tensors(1, 6, 4, False, spatial)
    assert_sound(aten.convolution.default, x, weight, bias, *settings)


HALOS = [  # size, kernel, stride, padding, dilation, what may be sharded
    (12, 3, 1, 1, 1, "x0"),
    (12, 1, 1, 0, 1, "x0"),
    (24, 3, 2, 1, 1, "x0"),
    (24, 7, 2, 3, 1, "x0"),
    (24, 1, 2, 0, 1, "x0"),
    (24, 2, 2, 0, 1, "x0"),
    (24, 3, 1, 2, 2, "x0"),
    (24, 4, 4, 0, 1, "x0"),
    (24, 2, 3, 0, 1, "x0"),
    (24, 5, 1, 2, 1, "x0"),
    (12, 3, 1, 0, 1, ""),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation", "shards"), HALOS)
def test_positions(size: int, kernel: int, stride: int, padding: int, dilation: int, shards: str) -> None:
    x, weight, bias = normal(1, 2, size), normal(3, 2, kernel), normal(3)
    settings = ([stride], [padding], [dilation], False, [0], 1)
    assert_sound(aten.convolution.default, x, weight, bias, *settings, shards=f"i o {shards}")
    assert_sound(aten.convolution.default, x, weight, None, *settings)
    gradient = normal(*aten.convolution(x, weight, bias, *settings).shape) + 1
    for mask in ([True, True, True], [False, True, True], [True, False, False]):
        sizes = [3] if mask[2] else None
        assert_sound(aten.convolution_backward.default, gradient, x, weight, sizes, *settings, mask)


TRANSPOSED = [  # size, kernel, stride, padding, dilation, output padding
    (12, 3, 1, 1, 1, 0),
    (12, 2, 2, 0, 1, 0),
    (12, 4, 2, 1, 1, 0),
    (12, 3, 2, 1, 1, 1),
    (12, 1, 2, 0, 1, 1),
    (24, 5, 1, 4, 2, 0),
]


@pytest.mark.parametrize(("size", "kernel", "stride", "padding", "dilation", "extra"), TRANSPOSED)
def test_positions_of_a_transposed_convolution(
    size: int, kernel: int, stride: int, padding: int, dilation: int, extra: int
) -> None:
    x, weight, bias = normal(1, 2, size), normal(2, 3, kernel), normal(3)
    settings = ([stride], [padding], [dilation], True, [extra], 1)
    assert_sound(aten.convolution.default, x, weight, bias, *settings, shards="i o x0")
    assert_sound(aten.convolution.default, x, weight, None, *settings)
    gradient = normal(*aten.convolution(x, weight, bias, *settings).shape) + 1
    for mask in ([True, True, True], [False, True, True], [True, False, False]):
        sizes = [3] if mask[2] else None
        assert_sound(aten.convolution_backward.default, gradient, x, weight, sizes, *settings, mask)


@pytest.mark.parametrize("transposed", [True, False])
def test_positions_of_two_dims_at_once(transposed: bool) -> None:
    x, weight, bias = normal(2, 4, 8, 6), normal(4, 2, 3, 3), normal(8 if transposed else 4)[:4]
    settings = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], 2)
    assert_sound(aten.convolution.default, x, weight, bias, *settings, shards="g i n o x0 x1")
    gradient = normal(*aten.convolution(x, weight, bias, *settings).shape) + 1
    assert_sound(
        aten.convolution_backward.default,
        gradient,
        x,
        weight,
        [4],
        *settings,
        [True, True, True],
        shards="g i n o x0 x1",
    )


def test_a_stretch_is_never_shorter_than_its_halo() -> None:
    _, rule = bound(aten.convolution.default, normal(1, 1, 24), normal(1, 1, 7), None, [1], [3], [1], False, [0], 1)
    sizes = {factor.name: (factor.size, factor.shardable, factor.contiguous) for factor in rule.factors}
    assert sizes["x0"] == (8, True, True)
    assert sizes["m0"] == (3, False, False)


# Convolution along time, against torch.


@pytest.mark.parametrize("pad", [0, 1])
def test_forward_and_backward(pad: int) -> None:
    x, weight, bias = normal(7, 6, 12), normal(3, 12, 8), normal(8)
    assert_sound(aten.conv_tbc.default, x, weight, bias, pad, shards="b i o")
    gradient = normal(7 - 2 + 2 * pad, 6, 8)
    assert_sound(aten.conv_tbc_backward.default, gradient, x, weight, bias, pad, shards="b i o")


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
