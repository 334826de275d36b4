"""Numbers far from zero: no strategy loses digits that one device keeps, forward and backward.

The samples of torch are checked for the same in `test_sweep`, which collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import register_rule
from autoshard.specs.axes import MeshShape
from tests.patterns.soundness._torch import tree_map_only
from tests.patterns.soundness.conditioning import lost_digits
from tests.patterns.soundness.record import record
from tests.patterns.soundness.samples import own_functions

aten = torch.ops.aten

FOUR, FIVE, TWO_AXES = (MeshShape.of(axes) for axes in ({"x": 4}, {"x": 5}, {"x": 2, "y": 2}))
RATIOS = {torch.float64: 1e8, torch.float32: 1e3}
"""Of means beside deviations: as far as one device still tells the deviations of."""

CHANNELS = 6
Function = Callable[..., Any]


def _rows(*shape: int) -> Tensor:
    """Deviations of one, around zero."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    channels = x.shape[1]
    running = torch.zeros(channels, dtype=x.dtype), torch.ones(channels, dtype=x.dtype)
    return [F.batch_norm(x, *running, weight, bias, training=True), *running]


def _by_variance(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, 0, correction=0)
    return (x - mean) * (variance + 1e-5).rsqrt() * weight + bias


def _by_deviations(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    deviation = x - x.mean(0)
    return deviation * (deviation.pow(2).mean(0) + 1e-5).rsqrt() * weight + bias


FUNCTIONS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "batch norm": (_batch_norm, (12, CHANNELS)),
    "batch norm of five": (_batch_norm, (5, CHANNELS)),
    "batch norm of images": (_batch_norm, (5, CHANNELS, 4, 7)),
    "instance norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, CHANNELS, 11)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (CHANNELS,), w, b), (5, 7, CHANNELS)),
    "layer norm of two dims": (lambda x, w, b: F.layer_norm(x, (7, CHANNELS)), (5, 7, CHANNELS)),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (4, CHANNELS, 7)),
    "group norm of images": (lambda x, w, b: F.group_norm(x, 1, w, b), (3, CHANNELS, 5, 8)),
    "rms norm": (lambda x, w, b: F.rms_norm(x, (CHANNELS,), w), (5, 7, CHANNELS)),
    "variance": (lambda x, w, b: [x.var(0), x.std((0, 1)), x.var(1, correction=0)], (5, 12)),
    "mean and variance": (lambda x, w, b: [*torch.var_mean(x, 0), *torch.std_mean(x, (0, 1))], (5, 12)),
    "norm by variance": (_by_variance, (5, CHANNELS)),
    "norm by deviations": (_by_deviations, (5, CHANNELS)),
    "norm by squares": (lambda x, w, b: x.pow(2).mean(0) - x.mean(0) ** 2, (5, CHANNELS)),
    "covariance": (lambda x, w, b: x.cov(), (5, 12)),
}


@pytest.mark.parametrize("dtype", RATIOS)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_moments_of_large_means_are_as_exact_as_on_one_device(name: str, dtype: torch.dtype) -> None:
    function, shape = FUNCTIONS[name]
    values = (_rows(*shape) + RATIOS[dtype], _rows(CHANNELS) + 1, _rows(CHANNELS))
    args = [value.to(dtype).requires_grad_() for value in values]
    found = [problem for call in record(function, args, {}, name) for problem in lost_digits(call, [FOUR, TWO_AXES])]
    assert not found, "\n".join(found[:5])


def _by_squares(call: LocalCall) -> Any:
    """The mean of squares minus the square of the mean, each reduced over the ranks."""
    emit, (value,), (size, _) = call.emit, call.operands, call.call.operands[0].shape
    mean, square = (
        call.all_reduce(emit.call(aten.div.Scalar, emit.call(aten.sum.dim_IntList, each, [0]), size), "i")
        for each in (value, emit.call(aten.mul.Tensor, value, value))
    )
    return emit.call(aten.sub.Tensor, square, emit.call(aten.mul.Tensor, mean, mean))


def test_a_variance_by_sums_of_squares_is_found_out() -> None:
    def spread(x: Tensor) -> Tensor:
        return x.var(0, correction=0)

    name = "autoshard_test_conditioning::spread"
    operator = torch.library.custom_op(name, spread, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(lambda x: x.new_empty(x.shape[1:]))
    register_rule(name, "i j -> j", reduce={"i": None}, local=_by_squares)
    far, near = (record(operator, (_rows(12, CHANNELS) + mean,), {}, "spread") for mean in (1e6, 0.0))
    assert [call for call in near if lost_digits(call, [FOUR])] == []
    assert any("i on x" in problem for problem in lost_digits(far[0], [FOUR]))


@pytest.mark.parametrize("name", list(own_functions()))
def test_every_operator_of_neural_networks_is_as_exact_as_on_one_device(name: str) -> None:
    function, args = own_functions()[name]

    def farther(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return (tensor.detach() + 1e6).requires_grad_(tensor.requires_grad)

    calls = record(function, tree_map_only(Tensor, farther, args), {}, name)
    found = [problem for call in calls for problem in lost_digits(call, [FOUR, FIVE])]
    assert not found, "\n".join(found[:5])
