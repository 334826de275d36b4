"""Cross-entropy of the logits of a linear layer, which are never materialised whole.

Logits `[n, v]` of a language model, with their softmax, are half of the peak of its training step. The operators of
this file take the layer's input and weight instead. They compute the logits in pieces and keep two numbers per row; the
backward recomputes every piece, and accumulates the gradients of input and weight.

If the loss is a mean or a sum, a piece of rows with all classes could be turned into its gradient at once. But every
such piece would be added to the gradient of the whole weight, and a rank mostly has fewer rows than classes: these sums
take longer than computing the logits twice (docs/memory.md has figures). Penalties of `logsumexp`, and losses weighted
row by row, need the second product anyway.

The loss of a row with logits `z` is `logsumexp(z) * sum(q) - sum(q * z)`, where `q` is the expected distribution of the
row: 1 at its target, or partly spread over all classes (label smoothing), times the class weights. So the two numbers
suffice for every option of `torch.nn.functional.cross_entropy`, and for a penalty of `logsumexp`.

Source: Liger-Kernel, "fused linear cross entropy", which has pieces of rows; cut cross-entropy (Wijmans et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from autoshard.operator_library import accumulation_dtype, define, define_backward

operators = torch.ops.autoshard
"""`logit_statistics(hidden, weight, bias, targets, class_weights, scale, cap, peak, uniform, is_class)`.

`hidden` is `[..., d]`, `weight` `[v, d]`, `bias` and `class_weights` are `[v]`, and `targets` is `[...]`. With the
products `z = hidden @ weight.T + bias` in the dtype of `hidden`, the logits are `cap * tanh(scale * z)`, or `scale * z`
if `cap` is 0, in the accumulation dtype. With `q[c] = class_weights[c] * (peak * (c == target) + uniform)` the results,
in that dtype and `[...]`, are `logsumexp(logits)` and `sum(q * logits)`. A negative target is none of these classes.
`is_class`, booleans `[v]`, is False for padding, whose weights are zero.

`logit_statistics_backward` returns the gradients of `hidden`, `weight` and `bias` selected by `output_mask`; the others
are empty.
"""

LEAST_STEP = 1024
"""Least rows or classes of a piece: products of fewer do not use a device well."""


def piece_step(width: int) -> int:
    """Return the rows of a piece with all classes, or the classes of a piece with all rows, by the layer's width.

    A gradient to which every piece is added then has no more elements than a piece, so that accumulation takes no
    longer than a pass over the logits.
    """
    return max(LEAST_STEP, width)


def _pieces(rows: int, classes: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and classes of every piece: the smaller of both is whole, so that products are not narrow."""
    step = piece_step(width)
    if rows <= classes:
        yield from ((slice(0, rows), slice(start, min(start + step, classes))) for start in range(0, classes, step))
    else:
        yield from ((slice(start, min(start + step, rows)), slice(0, classes)) for start in range(0, rows, step))


class _Logits:
    """The logits of one call, piece by piece, and their expected distribution; arguments as of the operator."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weights: Tensor | None,
        scale: float,
        cap: float,
        peak: float,
        uniform: float,
        is_class: Tensor | None = None,
    ) -> None:
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.weight, self.bias = weight, bias
        self.targets = targets.reshape(-1)
        self.dtype = accumulation_dtype(hidden.dtype)
        self.class_weights = None if class_weights is None else class_weights.to(self.dtype)
        self.scale, self.cap, self.peak, self.uniform = scale, cap, peak, uniform
        self.is_class = is_class

    def pieces(self) -> list[tuple[slice, slice]]:
        """Return the rows and classes of every piece."""
        return list(_pieces(self.hidden.shape[0], *self.weight.shape))

    def products(self, rows: slice, classes: slice) -> Tensor:
        """Return the logits of a piece before scale and cap."""
        return linear(self.hidden[rows], self.weight[classes], None if self.bias is None else self.bias[classes])

    def bound(self, products: Tensor) -> Tensor:
        """Return `tanh(scale * z)`, which becomes the logits when the cap multiplies it."""
        return products.to(self.dtype).mul(self.scale).tanh_()

    def logits(self, rows: slice, classes: slice) -> Tensor:
        """Return the logits of a piece, in any dtype in which they are exact."""
        products = self.products(rows, classes)
        if self.cap:
            return self.bound(products).mul_(self.cap)
        return products if self.scale == 1 else products.to(self.dtype).mul(self.scale)

    def without_padding(self, logits: Tensor, classes: slice) -> Tensor:
        """Return the logits of a piece, with -inf for padding."""
        return logits if self.is_class is None else logits.masked_fill_(~self.is_class[classes], -torch.inf)

    def places(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """Return the columns of the targets in a piece and the expected amounts there, `[rows, 1]` each.

        Returns:
            The column of every row's target, 0 if it is in another piece; and `class_weights * peak`, or 0 there.
        """
        place = self.targets[rows] - classes.start
        is_inside = (place >= 0) & (place < classes.stop - classes.start)
        place = place.masked_fill(~is_inside, 0)
        amount = is_inside.to(self.dtype) * self.peak
        if self.class_weights is not None:
            amount = amount * self.class_weights[classes][place]
        return place.unsqueeze(1), amount.unsqueeze(1)

    def everywhere(self, classes: slice) -> Tensor:
        """Return the expected amount of every class of a piece besides the target's."""
        if self.class_weights is not None:
            return self.class_weights[classes] * self.uniform
        return self.hidden.new_full((classes.stop - classes.start,), self.uniform, dtype=self.dtype)

    # Separate functions, so that all tensors of a piece are freed before the next one.

    def statistics(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """Return the logsumexp of a piece, and its part of the expected logit, `[rows]` each."""
        logits = self.logits(rows, classes)
        place, amount = self.places(rows, classes)
        # Where the amount is 0, the logit may be -inf, and 0 * inf is nan.
        chosen = torch.where(amount == 0, 0, logits.gather(1, place)).to(self.dtype)
        expected = (amount * chosen).squeeze(1)
        if self.uniform:
            expected += logits.to(self.dtype) @ self.everywhere(classes)
        return _logsumexp(self.without_padding(logits, classes), self.dtype), expected

    def gradient(
        self, rows: slice, classes: slice, grad_logsumexp: Tensor, grad_expected: Tensor, logsumexp: Tensor
    ) -> Tensor:
        """Return the gradient of the products of a piece, given `[rows, 1]` of its rows."""
        # In place wherever safe, since a piece is large.
        bound = self.bound(self.products(rows, classes)) if self.cap else None
        logits = self.logits(rows, classes) if bound is None else bound * self.cap
        logits = self.without_padding(logits, classes)
        narrow = self.hidden.dtype != self.dtype
        gradient = (logits - logsumexp if logits.dtype != self.dtype else logits.sub_(logsumexp)).exp_()
        del logits
        place, amount = self.places(rows, classes)
        factor = self.scale * (self.cap or 1)
        if not self.uniform and bound is None:
            # For most pieces, one pass multiplies and casts. The term of the target is added before that.
            at_target = (gradient.gather(1, place) * grad_logsumexp + amount * grad_expected) * factor
            out = torch.empty_like(gradient, dtype=self.hidden.dtype) if narrow else gradient
            torch.mul(gradient, grad_logsumexp * factor, out=out)
            return out.scatter_(1, place, at_target.to(out.dtype))
        gradient *= grad_logsumexp
        gradient.addr_(grad_expected.squeeze(1), self.everywhere(classes))
        gradient.scatter_add_(1, place, amount * grad_expected)
        if bound is not None:
            gradient *= bound.square_().neg_().add_(1)  # the derivative of tanh
        return gradient.mul_(factor).to(self.hidden.dtype)


def statistics(hidden: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Compute `logit_statistics`."""
    layer = _Logits(hidden, *options)
    count = layer.hidden.shape[0]
    logsumexp = hidden.new_full((count,), -torch.inf, dtype=layer.dtype)
    expected = hidden.new_zeros(count, dtype=layer.dtype)
    for rows, classes in layer.pieces():
        part, of_piece = layer.statistics(rows, classes)
        logsumexp[rows] = torch.logaddexp(logsumexp[rows], part)
        expected[rows] += of_piece
    shape = hidden.shape[:-1]
    return logsumexp.view(shape), expected.view(shape)


def _logsumexp(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logsumexp of every row."""
    # At the maximum, the log-softmax is the maximum minus this. Its kernel reads and writes once; every step of
    # `torch.logsumexp` does.
    maximum, place = logits.max(1, True)
    result = maximum.to(dtype) - torch.log_softmax(logits, 1, dtype=dtype).gather(1, place)
    return result.masked_fill(maximum == -torch.inf, -torch.inf).squeeze(1)


class _Sums:
    """A gradient `[size, ...]` to which parts of some rows are added, in the accumulation dtype.

    Args:
        like: a tensor of the gradient's shape and dtype.
        repeated: True if several parts are added to a row.
    """

    def __init__(self, like: Tensor, repeated: bool) -> None:
        self.dtype, self.repeated = like.dtype, repeated
        if repeated:
            self.value = like.new_zeros(like.shape, dtype=accumulation_dtype(like.dtype))
        else:
            self.value = like.new_empty(like.shape)

    def add(self, rows: slice, part: Tensor) -> None:
        if self.repeated:
            self.value[rows] += part
        else:
            self.value[rows] = part

    def add_product(self, rows: slice, left: Tensor, right: Tensor) -> None:
        if self.repeated and self.value.dtype == left.dtype:
            self.value[rows].addmm_(left, right)
        else:
            self.add(rows, left @ right)

    def result(self) -> Tensor:
        return self.value.to(self.dtype)


def gradients_of_logits(
    grad_logsumexp: Tensor,
    grad_expected: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    logsumexp: Tensor,
    scale: float,
    cap: float,
    peak: float,
    uniform: float,
    output_mask: Sequence[bool],
    is_class: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `logit_statistics_backward`."""
    layer = _Logits(hidden, weight, bias, targets, class_weights, scale, cap, peak, uniform, is_class)
    sums, of_expected, log = (each.reshape(-1, 1) for each in (grad_logsumexp, grad_expected, logsumexp))
    pieces = layer.pieces()
    by_classes = layer.hidden.shape[0] <= weight.shape[0] and len(pieces) > 1
    by_rows = layer.hidden.shape[0] > weight.shape[0] and len(pieces) > 1
    of_hidden = _Sums(layer.hidden, by_classes) if output_mask[0] else None
    of_weight = _Sums(weight, by_rows) if output_mask[1] else None
    of_bias = _Sums(bias, by_rows) if output_mask[2] and bias is not None else None
    for rows, classes in pieces:
        gradient = layer.gradient(rows, classes, sums[rows], of_expected[rows], log[rows])
        if of_hidden is not None:
            of_hidden.add_product(rows, gradient, weight[classes])
        if of_weight is not None:
            of_weight.add_product(classes, gradient.t(), layer.hidden[rows])
        if of_bias is not None:
            of_bias.add(classes, gradient.sum(0, dtype=layer.dtype))
        del gradient
    absent = hidden.new_empty(0)
    return (
        absent if of_hidden is None else of_hidden.result().view(hidden.shape),
        absent.clone() if of_weight is None else of_weight.result(),
        absent.clone() if of_bias is None else of_bias.result(),
    )


def _statistics_like(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    logsumexp = hidden.new_empty(hidden.shape[:-1], dtype=accumulation_dtype(hidden.dtype))
    return logsumexp, torch.empty_like(logsumexp)


def _gradients_like(
    grad_logsumexp: Tensor, grad_expected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    output_mask = options[7]  # after two tensors, their logsumexp and four numbers
    return tuple(
        each.new_empty(each.shape) if asked and each is not None else hidden.new_empty(0)
        for each, asked in zip((hidden, weight, bias), output_mask, strict=True)
    )


def _statistics_workspace(hidden: Tensor, weight: Tensor, *options: Any) -> int:
    """Return the bytes of a piece: its products, the same in the accumulation dtype, and their log-softmax."""
    elements, wide = _piece_elements(hidden, weight)
    return elements * (2 * wide + (hidden.dtype.itemsize if hidden.dtype.itemsize != wide else 0))


def _gradients_workspace(
    grad_logsumexp: Tensor, grad_expected: Tensor, hidden: Tensor, weight: Tensor, *options: Any
) -> int:
    """Return the bytes of a piece, and of sums in a wider dtype than that of the gradient."""
    cap = options[5]
    elements, wide = _piece_elements(hidden, weight)
    narrow = hidden.dtype.itemsize if hidden.dtype.itemsize != wide else 0
    rows = hidden.numel() // max(1, hidden.shape[-1])
    held = elements * ((2 if cap else 1) * wide + narrow)
    # Parts of every piece are added to a gradient, in another dtype.
    if narrow and elements < rows * weight.shape[0]:
        held += min(hidden.numel(), weight.numel()) * (narrow + wide)
    return held


def _piece_elements(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    """Return the elements of the largest piece, and the bytes of one in the accumulation dtype."""
    rows = hidden.numel() // max(1, hidden.shape[-1])
    first = next(_pieces(rows, *weight.shape), (slice(0, 0), slice(0, 0)))
    elements = (first[0].stop - first[0].start) * (first[1].stop - first[1].start)
    return elements, accumulation_dtype(hidden.dtype).itemsize


_OPTIONS = "float scale, float cap, float peak, float uniform"
define(
    "logit_statistics(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weights, "
    f"{_OPTIONS}, Tensor? is_class=None) -> (Tensor, Tensor)",
    statistics,
    _statistics_like,
    workspace=_statistics_workspace,
)
define(
    "logit_statistics_backward(Tensor grad_logsumexp, Tensor grad_expected, Tensor hidden, Tensor weight, "
    f"Tensor? bias, Tensor targets, Tensor? class_weights, Tensor logsumexp, {_OPTIONS}, bool[3] output_mask, "
    "Tensor? is_class=None) -> (Tensor, Tensor, Tensor)",
    gradients_of_logits,
    _gradients_like,
    workspace=_gradients_workspace,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.cap, ctx.peak, ctx.uniform, _ = inputs
    ctx.save_for_backward(*tensors, output[0])


def _differentiate(ctx: Any, grad_logsumexp: Tensor, grad_expected: Tensor) -> tuple[Any, ...]:
    mask = list(ctx.needs_input_grad[:3])
    gradients = operators.logit_statistics_backward(
        *(grad_logsumexp, grad_expected, *ctx.saved_tensors, ctx.scale, ctx.cap, ctx.peak, ctx.uniform, mask)
    )
    wanted = (gradient if asked else None for gradient, asked in zip(gradients, mask, strict=True))
    return (*wanted, *(None,) * 7)


define_backward("logit_statistics", _keep, _differentiate)

NONE, MEAN, SUM = 0, 1, 2
"""Values of ATen's `reduction` arguments."""


def statistics_of_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weights: Tensor | None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    scale: float = 1.0,
    cap: float = 0.0,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return `logsumexp` and the expected logit of every row, by the operator.

    Args:
        hidden: the input of the layer, `[..., d]`.
        weight, bias: of the layer, `[v, d]` and `[v]`.
        target: the class of every row, `[...]`.
        class_weights, ignore_index, label_smoothing: as of `torch.nn.functional.cross_entropy`.
        scale, cap: the logits are `cap * tanh(scale * z)`, or `scale * z` if `cap` is 0.
        dtype: of the layer's products.
    """
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    target = target.masked_fill(target == ignore_index, 0)
    class_weights = None if class_weights is None else class_weights.to(accumulation_dtype(dtype))
    uniform = label_smoothing / weight.shape[0]
    results: tuple[Tensor, Tensor] = operators.logit_statistics(
        hidden, weight, bias, target, class_weights, scale, cap, 1 - label_smoothing, uniform
    )
    return results


def cross_entropy_of_statistics(
    logsumexp: Tensor,
    expected: Tensor,
    target: Tensor,
    class_weights: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    classes: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of the logits with these statistics.

    The loss of a row whose target is no class is NaN. With whole logits it is an error, but a piece of the classes
    cannot distinguish it from a target in another piece.

    Args:
        logsumexp, expected: results of `statistics_of_logits`.
        target, class_weights, ignore_index, label_smoothing: as there.
        reduction: `NONE`, `MEAN` or `SUM`.
        classes: the number of classes.
        dtype: of the loss.
    """
    is_ignored = target == ignore_index
    weights = (~is_ignored).to(logsumexp.dtype)
    if class_weights is None:
        losses = logsumexp - expected
    else:
        class_weights = class_weights.to(logsumexp.dtype)
        places = target.masked_fill(is_ignored, 0)  # another target that is no class is an error here
        weights = weights * class_weights.index_select(0, places.flatten()).view(places.shape)
        total = weights
        if label_smoothing:
            total = weights * (1 - label_smoothing) + class_weights.mean() * label_smoothing
        losses = logsumexp * total - expected
    losses = losses.masked_fill((target < 0) | (target >= classes), torch.nan).masked_fill(is_ignored, 0)
    if reduction == NONE:
        return losses.to(dtype)
    loss = losses.sum()
    return (loss / weights.sum() if reduction == MEAN else loss).to(dtype)


def logsumexp_of_statistics(logsumexp: Tensor, keepdim: bool, *, dtype: torch.dtype) -> Tensor:
    """Return `torch.logsumexp` of the logits over the classes."""
    return (logsumexp.unsqueeze(-1) if keepdim else logsumexp).to(dtype)
