"""Sizes that no axis divides: every factor that may be sharded evenly may be sharded with padding too, and is sound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the operators of grouped products)
from torch import Tensor

from autoshard.operators.bags import MEAN, SUM
from autoshard.patterns.soundness import check
from autoshard.patterns.strategy import axis_choices
from tests.patterns.ops.soundness import aten, bound, normal

own = torch.ops.autoshard
moe = torch.ops.transformers

X = normal(5, 11, 7)
EVEN_ONLY = {
    "topk": {"d1"},  # the sorted dim, whose elements may be as small as what would have to pad it
    "isin": {"t0"},  # what is looked for: no number is known not to be among the elements
    "index_put, one row": {"index0"},  # the row is added once per index, of which some would be padding
    "convolution": {"x0", "x1"},  # whose stretches reach into each other
    "pool": {"x0", "x1"},
}
"""Factors that are split evenly alone, by the first words of a case."""


def indices(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def scattering() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    table, rows, where = normal(7, 5), normal(11, 5), indices(7, 11)
    places = indices(7, 11, 5)
    yield "index_add", aten.index_add.default, (table, 0, where, rows)
    yield "index_copy", aten.index_copy.default, (table, 0, torch.randperm(7)[:3], normal(3, 5))
    yield "index_fill", aten.index_fill.int_Scalar, (table, 0, where, 2.0)
    yield "index_reduce", aten.index_reduce.default, (table, 0, where, rows, "amax")
    yield "scatter", aten.scatter.src, (table, 1, torch.randperm(5)[:3].expand(7, 3), normal(7, 3))
    yield "scatter_add", aten.scatter_add.default, (table, 0, places, rows)
    yield "scatter, least", aten.scatter_reduce.two, (table, 0, places, rows, "amin")
    yield "scatter, greatest integer", aten.scatter_reduce.two, (indices(99, 7, 5), 0, places, places - 50, "amax")
    yield "index_put", aten.index_put.default, (table, [where], rows, True)
    yield "index_put, one row", aten.index_put.default, (table, [where], normal(5), True)
    yield "index_put, written", aten.index_put.default, (table, [None, torch.randperm(5)[:3]], normal(7, 3))
    yield "put", aten.put.default, (table, indices(35, 9), normal(9), True)
    yield "take", aten.take.default, (table, indices(35, 9))
    yield "one_hot", aten.one_hot.default, (indices(7, 5, 3), 7)
    yield "masked_scatter", aten.masked_scatter.default, (X, X > 0.3, normal(400))
    yield "gradient of masked_scatter", aten.masked_scatter_backward.default, (X, X > 0.3, [400])


def reductions() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    lowest = torch.full((5, 7), -math.inf, dtype=torch.float64)
    for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default):
        yield str(op), op, (X, 1)
    yield "cumsum of integers", aten.cumsum.default, (torch.arange(7), 0)
    yield "logcumsumexp of nothing", aten.logcumsumexp.default, (lowest, 1)
    yield "var of a large mean", aten.var_mean.correction, (X + 1e6, [0, 1])
    yield "std", aten.std.correction, (X, [2])
    yield "max", aten.max.dim, (X, 1)
    yield "argmin of all", aten.argmin.default, (X,)
    yield "argmax of what is as low as padding", aten.argmax.default, (lowest,)
    yield "min of truths", aten.min.dim, (torch.ones(7, 5, dtype=torch.bool), 0)
    yield "gradient of a selection", aten.value_selecting_reduction_backward.default, (
        normal(5, 7), 1, indices(11, 5, 7), [5, 11, 7], False,
    )  # fmt: skip
    yield "aminmax", aten.aminmax.default, (X,)
    yield "logsumexp", aten.logsumexp.default, (X, [1])
    for order in (-2.0, 0.0, 1.0, 3.0, math.inf, -math.inf):
        yield f"norm of order {order}", aten.linalg_vector_norm.default, (X, order, [1, 2])
    yield "dist", aten.dist.default, (normal(7, 5), normal(7, 5) + 1, 3)
    yield "topk", aten.topk.default, (X, 3, 1)
    yield "isin", aten.isin.Tensor_Tensor, (indices(99, 7, 5), torch.arange(8))
    yield "histc", aten.histc.default, (X, 5, -1, 1)


def matrices() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    yield "tril", aten.tril.default, (X, 1)
    yield "trace", aten.trace.default, (normal(7, 11),)
    yield "gradient of a diagonal", aten.diagonal_backward.default, (normal(7, 5), [7, 5, 11], 0, 1, 2)
    weight, length = normal(5, 7, 3), normal(5, 1, 1)
    lengths = aten._weight_norm_interface.default(weight, length, 0)[1]
    yield "weight_norm", aten._weight_norm_interface.default, (weight, length, 0)
    yield "gradient of weight_norm", aten._weight_norm_interface_backward.default, (
        normal(5, 7, 3), weight, length, lengths, 0,
    )  # fmt: skip
    yield "as_strided", aten.as_strided.default, (normal(5, 7), [7, 5], [1, 7])
    yield "unfold", aten.unfold.default, (normal(5, 21), 1, 7, 7)
    yield "gradient of unfold", aten.unfold_backward.default, (normal(5, 3, 7), [5, 21], 1, 7, 7)
    rows, weights, ends = normal(23, 7), normal(5, 7, 11), torch.tensor([3, 3, 9, 12, 20], dtype=torch.int32)
    yield "grouped product", moe.grouped_mm_fallback.default, (rows, weights, ends)
    yield "gradient of a grouped product", moe.grouped_mm_fallback_backward.default, (
        rows, weights, ends, normal(23, 11),
    )  # fmt: skip
    ends = torch.tensor([5, 5, 17, 17, 23], dtype=torch.int32)
    yield "groups of rows", aten._grouped_mm.default, (normal(23, 40).bfloat16(), normal(5, 40, 24).bfloat16(), ends)
    yield "groups summed", aten._grouped_mm.default, (normal(23, 40).bfloat16().t(), normal(23, 24).bfloat16(), ends)


def images() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    image, groups = normal(3, 6, 4, 4), ([1, 1], [1, 1], [1, 1], False, [0, 0], 3)
    yield "convolution", aten.convolution.default, (image, normal(9, 2, 3, 3), normal(9), *groups)
    mask = [True, True, True]
    gradient = (normal(3, 9, 4, 4), image, normal(9, 2, 3, 3), [9], *groups, mask)
    yield "convolution's gradient", aten.convolution_backward.default, gradient
    yield "pool of greatest", aten.max_pool2d_with_indices.default, (image, [2, 2])
    yield "pool of means", aten.avg_pool2d.default, (image, [2, 2])
    yield "adaptive means", aten._adaptive_avg_pool2d.default, (normal(3, 5, 10, 6), [5, 3])
    yield "copies", aten.upsample_nearest2d.default, (normal(3, 5, 7, 3), [14, 9])
    yield "gradient of copies", aten.upsample_nearest2d_backward.default, (
        normal(3, 5, 14, 9), [14, 9], [3, 5, 7, 3],
    )  # fmt: skip
    yield "channel_shuffle", aten.channel_shuffle.default, (normal(3, 15, 2, 5), 5)
    yield "affine grid", aten.affine_grid_generator.default, (normal(5, 2, 3), [5, 2, 3, 4], False)


def losses() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    scores, classes, labels = normal(11, 5), torch.arange(11) % 5, torch.tensor([[1, 3, -1, 0, 0]]).repeat(11, 1)
    probabilities, weight = normal(11, 5).sigmoid(), normal(5).abs()
    for reduction in (0, 1, 2):
        settings = (1, 0.7, None, reduction)
        yield f"margin {reduction}", aten.multi_margin_loss.default, (scores, classes, *settings)
        yield f"margin of labels {reduction}", aten.multilabel_margin_loss_forward.default, (scores, labels, reduction)
        yield f"soft margin {reduction}", aten.soft_margin_loss.default, (scores, scores.flip(0).sign(), reduction)
        yield f"logits {reduction}", aten.binary_cross_entropy_with_logits.default, (
            scores, probabilities, weight, weight.flip(0), reduction,
        )  # fmt: skip
    loss, is_target = aten.multilabel_margin_loss_forward(scores, labels, 1)
    back = aten.multilabel_margin_loss_backward.default
    yield "gradient of margin of labels", back, (loss, scores, labels, 1, is_target)
    sequences = (normal(8, 11, 7).log_softmax(-1), torch.arange(33).view(11, 3) % 6 + 1)
    sequences += (torch.arange(11) % 3 + 6, torch.arange(11) % 3 + 1)
    yield "ctc", own.ctc_loss.default, (*sequences, 0, False)
    yield "gradient of ctc", own.ctc_loss_backward.default, (normal(11), *sequences, 0, False)


def bags() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    table, words, weights, gradient = normal(13, 5), indices(13, 11, 3), normal(11, 3), normal(11, 5)
    yield "bags", own.bags.default, (table, words, weights, SUM, 3)
    yield "means of bags", own.bags.default, (table, words, None, MEAN, 3)
    yield "gradient of bags", own.bags_backward.default, (gradient, words, None, 13, MEAN, 3)
    yield "gradient of weights", own.bags_weights_backward.default, (gradient, table, words, SUM, 3)
    offsets = torch.tensor([0, 4, 4])
    yield "bags by offsets", aten._embedding_bag.default, (table, words[:, 0].contiguous(), offsets, False, SUM, False)


def draws() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    ones = torch.ones(3001, dtype=torch.float64)
    yield "gamma", aten._standard_gamma.default, (ones + 1,)
    yield "binomial", aten.binomial.default, (ones * 7, ones / 3)
    yield "rrelu", aten.rrelu_with_noise_functional.default, (normal(3001), normal(3001), 0.1, 0.3, True)


@cache
def cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    families = (scattering, reductions, matrices, images, losses, bags, draws)
    return {name: (op, args) for family in families for name, op, args in family()}


@pytest.mark.parametrize("name", list(cases()))
def test_rule_is_sound(name: str) -> None:
    op, args = cases()[name]
    _, rule = bound(op, *args)
    even = {factor.name for factor in rule.factors if factor.shardable and factor.size > 1 and not factor.uneven}
    assert even <= next((names for words, names in EVEN_ONLY.items() if name.startswith(words)), set())
    assert len(axis_choices(rule, 4)) > 1
    findings = check(op, args, sizes=(4,))
    assert not findings, "\n".join(map(str, findings[:5]))
