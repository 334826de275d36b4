"""Rules of operators whose windows slide over positions, on random windows, against torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from autoshard.patterns.registry import has_rule
from autoshard.patterns.soundness import check
from tests.patterns.ops.soundness import aten, normal
from tests.releases import skip


class Window(NamedTuple):
    """Windows along one dim: a number of positions, and how windows slide over them."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Positions from the first to the last of a window."""
        return self.dilation * (self.kernel - 1)

    @property
    def count(self) -> int:
        """The number of windows."""
        return (self.size + 2 * self.padding - self.reach - 1) // self.stride + 1


@st.composite
def windows(draw: st.DrawFn, *, dilated: bool = True, pools: bool = False) -> Window:
    """Most have `stride` positions for each window, so that positions may be sharded; others are drawn at random."""
    kernel, stride = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 3)) if dilated else 1
    reach = dilation * (kernel - 1)
    padding = draw(st.integers(0, min(reach, kernel // 2) if pools else reach))
    count = draw(st.sampled_from((4, 6, 8, 12)))
    size = draw(st.one_of(st.just(count * stride), st.just(count * stride), st.integers(1, 24)))
    window = Window(size, kernel, stride, padding, dilation)
    assume(size + 2 * padding > reach and (not pools or size > reach))
    return window


Settings = tuple[list[int], list[int], list[int], list[int], list[int]]


def _settings(drawn: list[Window]) -> Settings:
    """Sizes, kernels, strides, paddings and dilations of several dims."""
    return tuple(list(each) for each in zip(*drawn, strict=True))


def _several(draw: st.DataObject, spatial: int, **options: Any) -> Settings:
    """Windows over so many dims: random ones along one of them, the smallest along the others."""
    drawn = [Window(2, 1, 1, 0, 1)] * spatial
    drawn[draw.draw(st.integers(0, spatial - 1))] = draw.draw(windows(**options))
    return _settings(drawn)


def _assert_sound(op: Any, *args: Any) -> None:
    findings = check(op, args, sizes=(2, 3))
    assert not findings, "\n".join(map(str, findings[:3]))


few = settings(max_examples=8, deadline=None, derandomize=True)


def _check_convolution(sizes: list[int], weight: list[int], rest: tuple[Any, ...]) -> None:
    x, transposed = normal(1, 2, *sizes), rest[3]
    weights, bias = normal(2, 2, *weight), normal(2)
    _assert_sound(aten.convolution.default, x, weights, bias, *rest)
    gradient = normal(*aten.convolution(x, weights, bias, *rest).shape) + 1
    mask = [True, True, True]
    _assert_sound(aten.convolution_backward.default, gradient, x, weights, [2], *rest, mask)
    if transposed:
        _assert_sound(aten.convolution.default, x, weights, None, *rest)


# The windows of a stride of 3 begin a row before it and leave its last row unread.
UNREAD_ROWS = [Window(18, 3, 3, 1, 1), Window(16, 3, 4, 1, 1), Window(24, 2, 4, 1, 1), Window(24, 1, 2, 0, 1)]


@pytest.mark.parametrize("window", UNREAD_ROWS)
def test_rows_unread_behind_windows_belong_to_the_next_rank(window: Window) -> None:
    size, kernel, stride, padding, dilation = _settings([window])
    _check_convolution(size, kernel, (stride, padding, dilation, False, [0], 1))


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data())
@few
def test_convolutions(spatial: int, data: st.DataObject) -> None:
    sizes, kernels, strides, paddings, dilations = _several(data, spatial)
    _check_convolution(sizes, kernels, (strides, paddings, dilations, False, [0] * spatial, 1))


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data())
@few
def test_transposed_convolutions(spatial: int, data: st.DataObject) -> None:
    sizes, kernels, strides, paddings, dilations = _several(data, spatial)
    results = [
        (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1
        for size, kernel, stride, padding, dilation in zip(sizes, kernels, strides, paddings, dilations, strict=True)
    ]
    # What makes a result of `stride` positions for each of the operand's, where torch allows it.
    extra = [
        min(max(size * stride - result, 0), max(stride, dilation) - 1)
        for size, stride, dilation, result in zip(sizes, strides, dilations, results, strict=True)
    ]
    assume(all(result + more > 0 for result, more in zip(results, extra, strict=True)))
    _check_convolution(sizes, kernels, (strides, paddings, dilations, True, extra, 1))


@pytest.mark.parametrize("spatial", [2, 3])
@given(data=st.data(), ceil=st.booleans())
@few
def test_largest(spatial: int, data: st.DataObject, ceil: bool) -> None:
    sizes, *window = _several(data, spatial, pools=True)
    x = normal(1, 2, *sizes)
    forward, backward = (getattr(aten, f"max_pool{spatial}d_with_indices{end}").default for end in ("", "_backward"))
    result, indices = forward(x, *window, ceil)
    _assert_sound(forward, x, *window, ceil)
    _assert_sound(backward, result + 1, x, *window, ceil, indices)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@given(data=st.data(), ceil=st.booleans(), counted=st.booleans(), divisor=st.sampled_from((None, 3)))
@few
def test_means(spatial: int, data: st.DataObject, ceil: bool, counted: bool, divisor: int | None) -> None:
    sizes, kernels, strides, paddings, _ = _several(data, spatial, pools=True, dilated=False)
    rest = (kernels, strides, paddings, ceil, counted)
    x = normal(1, 2, *sizes)
    if spatial == 1:
        if not has_rule(aten.avg_pool1d.default):
            skip("an operator for pools of one dim in graphs")
        _assert_sound(aten.avg_pool1d.default, x, *rest)
        return
    forward, backward = (getattr(aten, f"avg_pool{spatial}d{end}").default for end in ("", "_backward"))
    _assert_sound(forward, x, *rest, divisor)
    gradient = normal(*forward(x, *rest, divisor).shape) + 1
    _assert_sound(backward, gradient, x, *rest, divisor)


@given(data=st.data())
@few
def test_patches(data: st.DataObject) -> None:
    sizes, kernels, strides, paddings, dilations = _several(data, 2)
    window = (kernels, dilations, paddings, strides)
    x = normal(2, 2, *sizes)
    _assert_sound(aten.im2col.default, x, *window)
    _assert_sound(aten.col2im.default, normal(*aten.im2col(x, *window).shape) + 1, sizes, *window)


@given(data=st.data())
@few
def test_unfolded_dims(data: st.DataObject) -> None:
    window = data.draw(windows(dilated=False))
    assume(window.size >= window.kernel)
    x = normal(2, window.size, 4)
    unfolded = (1, window.kernel, window.stride)
    _assert_sound(aten.unfold.default, x, *unfolded)
    _assert_sound(aten.unfold_backward.default, normal(*x.unfold(*unfolded).shape) + 1, list(x.shape), *unfolded)


@given(size=st.integers(2, 24), result=st.integers(1, 24))
@few
def test_windows_of_a_given_number(size: int, result: int) -> None:
    x = normal(2, 2, size, 2)
    _assert_sound(aten._adaptive_avg_pool2d.default, x, [result, 2])
    _assert_sound(aten._adaptive_avg_pool2d_backward.default, normal(2, 2, result, 2) + 1, x)
    largest, indices = aten.adaptive_max_pool2d(x, [result, 2])
    _assert_sound(aten.adaptive_max_pool2d.default, x, [result, 2])
    _assert_sound(aten.adaptive_max_pool2d_backward.default, largest + 1, x, indices)
