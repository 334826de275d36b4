from __future__ import annotations

import pytest

from tests.patterns.ops.soundness import assert_sound, aten, normal

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
