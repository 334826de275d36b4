"""Convolutions: batch, input and output channels, groups and positions may be sharded.

Positions are sharded where the larger image has exactly `stride` positions for each of the smaller one, as with "same"
padding. Every rank then computes its stretch of the result from its stretch of the operand and a halo: the adjacent
rows of the neighbours. A convolution extends its operand by the rows that its windows reach. A transposed convolution,
and gradients, do the adjoint: they send rows computed for the neighbours to them, which add them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops.helpers import all_gather_stacked, bind_named, named_values, shape_of
from autoshard.patterns.ops.matmul import with_added
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import Exchange, OpCall, Rule, TensorMeta

# Windows over sharded positions, and halos; pooling uses them, too.


@dataclass(frozen=True, slots=True)
class Halo:
    """Rows of the neighbours that a window needs along one sharded dim.

    Attributes:
        name: the sharded factor.
        dim: the dim of the tensor.
        before: rows of the previous rank, at most as many as a stretch has.
        after: rows of the next rank; negative where windows do not reach the last rows of the stretch.
    """

    name: str
    dim: int
    before: int
    after: int

    @property
    def rows(self) -> int:
        """Rows of the neighbours, on both sides."""
        return self.before + max(self.after, 0)


@dataclass(frozen=True, slots=True)
class Windows:
    """The position dims of two images: windows slide over the larger one, one per position of the smaller one.

    Attributes:
        small: position dims of the smaller image, in the notation of rules.
        large: position dims of the larger image.
        sizes: sizes of the names in them.
        halos: for every dim that can be sharded, the rows of the larger image around a stretch that its windows need.
    """

    small: list[str]
    large: list[str]
    sizes: dict[str, int]
    halos: list[Halo]

    def sharded_halos(self, call: LocalCall) -> list[Halo]:
        """The halos of the dims that are sharded in this call."""
        return [halo for halo in self.halos if call.axes(halo.name)]

    def exchanges(self, large: TensorMeta, tensors: int = 1) -> dict[str, list[Exchange]]:
        """Bytes of the halo exchanges of `tensors` tensors of the size of `large`, by factor."""
        return {
            halo.name: [("gather_of_each", halo.rows * large.bytes // large.shape[halo.dim])] * tensors
            for halo in self.halos
        }


def windows_over(
    first: int,
    small: Sequence[int],
    large: Sequence[int],
    strides: Sequence[int],
    before: Sequence[int],
    reaches: Sequence[int],
) -> Windows:
    """Return the factors of position dims, which are sharded into stretches no shorter than the halo.

    The larger image must have exactly `stride` positions for each of the smaller one, so that stretches correspond.

    Args:
        first: the first position dim of both images.
        small: sizes of the smaller image; 0 where windows are not in this order.
        large: sizes of the larger image.
        strides: of the windows.
        before: padding before the larger image.
        reaches: distance from the first to the last position of a window.
    """
    windows = Windows([], [], {}, [])
    for place, (less, more, stride, ahead, reach) in enumerate(
        zip(small, large, strides, before, reaches, strict=True)
    ):
        after = reach - ahead - stride + 1
        # A halo must not reach beyond the neighbour: a stretch has at least `least` windows.
        parts = (part for part in range(1, less + 1) if less % part == 0 and part * stride >= max(ahead, after))
        least = next(parts, 0)
        if more != less * stride or least in (0, less):
            windows.small.append(f"q{place}!")
            windows.large.append(f"p{place}!")
            continue
        windows.small.append(f"(x{place}^ m{place}!)")
        windows.large.append(f"(x{place}^ m{place}! e{place}!)")
        windows.sizes.update({f"x{place}": less // least, f"m{place}": least, f"e{place}": stride})
        windows.halos.append(Halo(f"x{place}", first + place, ahead, after))
    return windows


def window_settings(values: Sequence[int] | int, count: int) -> Sequence[int]:
    """A setting of windows for every position dim; one number may stand for all of them."""
    if isinstance(values, int):
        return [values] * count
    return values if len(values) > 1 else list(values) * count


def padding_beside(halos: Iterable[Halo], first: int, padding: Sequence[int]) -> list[int]:
    """The padding of position dims, `first` and on, with 0 where a halo replaces it."""
    bare = {halo.dim - first for halo in halos}
    return [0 if place in bare else size for place, size in enumerate(padding)]


def extend_by_halos(call: LocalCall, value: Any, halos: Iterable[Halo], fill: float = 0.0) -> Any:
    """Extend `value` by its neighbours' rows along several dims; by `fill` at the two ends."""
    for halo in halos:
        # This rank's last rows precede the next stretch; its first rows follow the previous one.
        borders = [_last_rows(value, halo.dim, halo.before), _first_rows(value, halo.dim, max(halo.after, 0))]
        before, behind = _neighbour_borders(call, borders, halo, fill)
        if halo.after < 0:  # this stretch's windows do not reach its last rows; the next rank's may
            value = value.slice(halo.dim, 0, value.shape[halo.dim] + halo.after)
        value = _concatenate(call, [before, value, behind], halo.dim)
    return value


def fold_halos(call: LocalCall, value: Any, halos: Iterable[Halo]) -> Any:
    """The adjoint of `extend_by_halos`: send the rows computed for the neighbours, who add them to theirs."""
    for halo in halos:
        dim, after = halo.dim, max(halo.after, 0)
        rows = value.shape[dim] - halo.before - after
        inner = value.slice(dim, halo.before, halo.before + rows)
        lent = [_last_rows(value, dim, after), _first_rows(value, dim, halo.before)]
        back = _neighbour_borders(call, lent, halo, 0.0)
        if halo.after < 0:
            inner, rows = _concatenate(call, [inner, _zeros(inner, dim, -halo.after)], dim), rows - halo.after
        for part, place in ((back[0], slice(0, after)), (back[1], slice(rows - halo.before, rows))):
            if part is not None:
                # Pad and add: programs have no in-place writes.
                around = (_zeros(inner, dim, count) for count in (place.start, inner.shape[dim] - place.stop))
                inner = inner + _concatenate(call, [next(around), part, next(around)], dim)
        value = inner
    return value


def _first_rows(value: Any, dim: int, count: int) -> Any:
    return value.slice(dim, 0, count) if count else None


def _last_rows(value: Any, dim: int, count: int) -> Any:
    rows = value.shape[dim]
    return value.slice(dim, rows - count, rows) if count else None


def _concatenate(call: LocalCall, parts: list[Any], dim: int) -> Any:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else call.emit.cat(present, dim)


def _zeros(like: Any, dim: int, rows: int) -> Any:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_zeros(shape) if rows else None


def _neighbour_borders(call: LocalCall, borders: list[Any], halo: Halo, fill: float) -> list[Any]:
    """The first border of the previous rank and the second of the next rank; `fill` where there is none."""
    if all(border is None for border in borders):
        return borders
    # One gather of both borders: an exchange with neighbours alone would branch on the rank.
    ranks = all_gather_stacked(call, _concatenate(call, borders, halo.dim), halo.name)
    rows = [0 if border is None else border.shape[halo.dim] for border in borders]
    before = _neighbour_rows(call, ranks, halo, -1, slice(0, rows[0]), fill) if rows[0] else None
    after = _neighbour_rows(call, ranks, halo, 1, slice(rows[0], sum(rows)), fill) if rows[1] else None
    return [before, after]


def _neighbour_rows(call: LocalCall, ranks: Any, halo: Halo, step: int, place: slice, fill: float) -> Any:
    """Rows `place` of the rank `step` places further, from the stacked `ranks`; `fill` where there is none."""
    last = call.share(halo.name) - 1
    neighbour = call.position(halo.name) + step
    outside = neighbour < 0 if step < 0 else neighbour > last
    # The ranks at the ends read any rank's rows, which `fill` then replaces.
    row = ranks.index_select(0, neighbour.clamp(0, last).view([1])).squeeze(0)
    return row.slice(halo.dim, place.start, place.stop).masked_fill(outside, fill)


# Convolutions of images.


def _windows(call: OpCall) -> Windows:
    """The position dims; the larger image is the operand, or the result of a transposed convolution."""
    images = shape_of(call, "input")[2:], _result_meta(call).shape[2:]
    small, large = images if call.arg("transposed") else reversed(images)
    kernels = shape_of(call, "weight")[2:]
    strides, padding, dilations = (
        window_settings(call.arg(name), len(kernels)) for name in ("stride", "padding", "dilation")
    )
    reaches = [dilation * (kernel - 1) for dilation, kernel in zip(dilations, kernels, strict=True)]
    return windows_over(2, small, large, strides, padding, reaches)


def _result_meta(call: OpCall) -> TensorMeta:
    """The result of the convolution; in the backward, its gradient."""
    result = call.arg("grad_output") if call.is_backward else call.result
    assert isinstance(result, TensorMeta)
    return result


def _operand_dims(call: OpCall, windows: Windows) -> dict[str, str]:
    """Dims of input, weight, bias and result; g are the groups, i and o the channels of one group."""
    small, large = " ".join(windows.small), " ".join(windows.large)
    kernel = " ".join(f"k{place}!" for place in range(len(windows.small)))
    transposed = call.arg("transposed")
    return {
        "input": f"n (g i) {small if transposed else large}",
        "weight": f"(g i) o {kernel}" if transposed else f"(g o) i {kernel}",
        "bias": "(g o)",
        "result": f"n (g o) {large if transposed else small}",
    }


def _convolution_rule(call: OpCall, windows: Windows, tensors: int, **options: Any) -> Rule:
    """The rule of forward or backward, with halo exchanges of `tensors` tensors; options as in `bind_named`."""
    # The weight's first dim has the output channels of all groups; of a transposed convolution, the input channels.
    first, second = shape_of(call, "weight")[:2]
    groups, transposed = call.arg("groups"), call.arg("transposed")
    ways = ("i", "o") if transposed else ("o", "i")
    large = _result_meta(call) if transposed else call.arg("input")
    return bind_named(
        call,
        sizes={"g": groups, ways[0]: first // groups, ways[1]: second} | windows.sizes,
        exchange=windows.exchanges(large, tensors),
        uneven=("n", "g", "o"),  # positions are not: a neighbour's rows are at the very end of its stretch
        **options,
    )


def _padding_arguments(call: LocalCall, halos: list[Halo]) -> dict[str, Any]:
    """Padding arguments without padding of the sharded dims, whose halos replace it."""
    spatial = len(shape_of(call.call, "weight")) - 2
    return {
        name: padding_beside(halos, 2, window_settings(call.arg(name), spatial))
        for name in ("padding", "output_padding")
    }


@rule_maker("aten.convolution")
def convolution(call: OpCall) -> Rule:
    """Forward: input channels are contracted."""
    windows = _windows(call)
    items = _operand_dims(call, windows)
    return _convolution_rule(
        call,
        windows,
        1,
        operands=items,
        results=[items["result"]],
        linear=[{"input", "bias"}, {"weight", "bias"}],
        local=_convolution,
        fill={"i": 0.0},
    )


def _convolution(call: LocalCall) -> Any:
    values, halos = named_values(call), _windows(call.call).sharded_halos(call)
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    position = call.position("i")
    if "bias" in values and position is not None:
        # Only the first rank of a contracted factor may add the bias.
        values["bias"] = values["bias"] * position.eq(0)
    if not call.arg("transposed"):
        values["input"] = extend_by_halos(call, values["input"], halos)
        return call.run(operands=list(values.values()), **changed)
    # A transposed convolution.
    if not halos or "bias" not in values:
        return fold_halos(call, call.run(operands=list(values.values()), **changed), halos)
    # Rows sent to a neighbour are added to rows that already have the bias.
    zeros = call.emit.zeros_like(values["bias"])
    result = call.run(operands=[values["input"], values["weight"], zeros], **changed)
    bias = values["bias"].view([-1, *[1] * (len(result.shape) - 2)])
    return fold_halos(call, result, halos) + bias


@rule_maker("aten.convolution_backward")
def convolution_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias.

    The input's is partial over output channels, the weight's and the bias's over batch and positions. The bias's is
    whole on ranks with different input channels, since all of them have the whole incoming gradient.
    """
    windows = _windows(call)
    items = _operand_dims(call, windows)
    wanted = tuple(call.arg("output_mask"))
    linear = [{"grad_output"}]
    # Each gradient is bilinear: if it is the only one wanted, it is linear in its other operand, too.
    if wanted == (False, True, False):
        linear.append({"input"})
    if wanted == (True, False, False):
        linear.append({"weight"})
    return _convolution_rule(
        call,
        windows,
        1 if call.arg("transposed") else 1 + wanted[0],
        operands={"grad_output": items["result"], "input": items["input"], "weight": items["weight"]},
        results=[items["input"], items["weight"], items["bias"]],
        linear=linear,
        reduce={"i": ("sum", "sum", None)},
        local=_convolution_backward,
        fill={"i": None},
    )


def _convolution_backward(call: LocalCall) -> Any:
    values, halos = named_values(call), _windows(call.call).sharded_halos(call)
    changed = {"groups": call.size("g"), **_padding_arguments(call, halos)}
    channels = call.arg("bias_sizes")
    if channels is not None:
        changed["bias_sizes"] = [call.operand_shape(0)[1]]
    if not halos:
        return call.run(**changed)
    transposed, wanted = call.arg("transposed"), call.arg("output_mask")
    large = "grad_output" if transposed else "input"
    gradient = values["grad_output"]
    values[large] = extend_by_halos(call, values[large], halos)
    # The bias's gradient is summed separately, without the rows of halos, which the neighbours sum.
    mask = [wanted[0], wanted[1], wanted[2] and not transposed]
    grad_input, grad_weight, grad_bias = call.run(operands=list(values.values()), output_mask=mask, **changed)
    if wanted[0] and not transposed:
        # The adjoint of several extensions is in reverse order, so that corners pass through both neighbours.
        grad_input = fold_halos(call, grad_input, list(reversed(halos)))
    if wanted[2] and transposed:
        dims = [dim for dim in range(len(gradient.shape)) if dim != 1]
        grad_bias = gradient.sum(dims)
    return grad_input, grad_weight, grad_bias


# Convolution along time of tensors laid out as (time, batch, channels).


@rule_maker("aten.conv_tbc")
def _conv_tbc(call: OpCall) -> Rule:
    """Input channels are contracted; the bias counts once."""
    text, local = "t! b i, k! i o, o -> time! b o", with_added(2, "i")
    return bind(text, call, linear="0+2, 1+2", local=local, uneven=("b", "o"), fill={"i": 0.0})


# Gradients of input, weight and bias; only the bias's shape is read. A rank sums the whole gradient of the bias,
# whichever input channels it has.
rule(
    "aten.conv_tbc_backward",
    "time! b o, t! b i, k! i o, o -> t! b i, k! i o, o",
    linear="0",
    reduce={"i": ("sum", "sum", None)},
)
