"""Operators that slice or join dims: slices, pieces, elements, padding and windows.

If a dim of size N is cut at some boundaries, the greatest common divisor g of N and the boundaries is an inner factor
that is not cut: only the outer factor N / g is. Sharding g keeps the operator local (heads inside a fused projection,
say); the outer factor can't be sharded. For a slice of one element of every `step`, the outer factor N / step is the
one that stays local.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import torch

from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops.helpers import argument_dim, bind_named, numbered_dims, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import NamedDims, OpCall, Rule, TensorMeta, build
from autoshard.size import common_divisor

CUT = "cut"
"""The name of the inner factor of the dim that is cut."""


def cut_rule(
    call: OpCall, dim: int, inner: int, *, linear: Sequence[set[int]] = (), local: Any = None, free: bool = False
) -> Rule:
    """The rule of tensors with the same dims but `dim`, whose common inner factor has the size `inner`."""
    sizes: dict[str, int] = {CUT: inner}
    whole: list[str] = []

    def name_dims(place: str, meta: TensorMeta) -> NamedDims:
        outer = f"{place}_parts"
        sizes.update({f"d{index}": size for index, size in enumerate(meta.shape) if index != dim})
        sizes[outer] = meta.shape[dim] // inner
        whole.append(outer)
        if meta.shape[dim] == 0:
            whole.append(CUT)  # a dim of size 0 cannot be sharded
        return [[outer, CUT] if index == dim else f"d{index}" for index in range(len(meta.shape))]

    operands = [name_dims(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [
        None if meta is None else name_dims(f"result{position}", meta) for position, meta in enumerate(call.results)
    ]
    return build(sizes, operands, results, whole=whole, linear=linear, local=local, free=free, uneven=True)


def common_inner_size(*boundaries: int) -> int:
    """The size of the inner factor that is not cut at these boundaries; 1 where everything is empty."""
    return reduce(common_divisor, boundaries, 0) or 1


def _local_place(call: LocalCall, place: int) -> int:
    """Convert a boundary, between steps of the outer factor, to the local dim."""
    inner = math.prod(call.rule.factors[index].size for index in call.rule.indices(CUT))
    return place // inner * call.size(CUT)


def _full(call: OpCall) -> TensorMeta:
    """The tensor that is sliced or written to."""
    return call.result if call.is_backward else call.operands[0]


def _local_full_shape(call: LocalCall) -> tuple[int, ...]:
    return call.result_shape() if call.call.is_backward else call.operand_shape(0)


def _local_sizes(call: LocalCall) -> dict[str, Any]:
    """The argument of a backward for the shape of its result."""
    return {"input_sizes": list(call.result_shape())} if call.call.is_backward else {}


@rule_maker("aten.slice.Tensor", "aten.slice_backward", "aten.slice_scatter")
def _slice(call: OpCall) -> Rule:
    """A slice, or the reverse; with a step that does not divide the dim, the dim is not split."""
    shape = _full(call).shape
    dim = argument_dim(call, len(shape))
    size, step, (start, end) = shape[dim], call.arg("step"), _bounds(call)
    options: dict[str, Any] = {
        "linear": [set(range(len(call.operands)))],
        "free": call.name == "aten::slice",
    }
    if step == 1:
        return cut_rule(call, dim, common_inner_size(size, start, end), local=_local_slice, **options)
    if start < step and size % step == 0 and end - start > size - step:
        # One element of every `step`: the dim is (groups, step) in the whole tensor and (groups) in the slice.
        sizes = numbered_dims(shape)
        sizes |= {CUT: sizes.pop(f"d{dim}") // step, "step": step}
        long = [[CUT, "step"] if index == dim else [f"d{index}"] for index in range(len(shape))]
        short = [[CUT] if index == dim else names for index, names in enumerate(long)]
        operands, results = (
            [long if meta is not None and meta.shape == shape else short for meta in metas]
            for metas in (call.operands, call.results)
        )
        return build(sizes, operands, results, whole=["step"], local=_local_strided_slice, uneven=True, **options)
    return cut_rule(call, dim, 1, local=lambda program: program.run(**_local_sizes(program)), **options)


def _bounds(call: OpCall) -> tuple[int, int]:
    """Start and end of a slice, from 0 to the size of its dim."""
    shape = _full(call).shape
    size, start, end = shape[argument_dim(call, len(shape))], call.arg("start"), call.arg("end")
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    return start, min(max(end + size if end < 0 else end, start), size)


def _local_strided_slice(call: LocalCall) -> Any:
    """The same slice of the local dim, to its end."""
    shape, (start, _) = _local_full_shape(call), _bounds(call.call)
    return call.run(start=start, end=shape[argument_dim(call, len(shape))], **_local_sizes(call))


def _local_slice(call: LocalCall) -> Any:
    """The slice with start and end in the local dim."""
    start, end = (_local_place(call, place) for place in _bounds(call.call))
    return call.run(start=start, end=end, **_local_sizes(call))


def slice_backward_by_padding(call: LocalCall) -> Any:
    """`aten.slice_backward` by padding with zeros, which works for any sizes of the other dims."""
    (value,), step = call.operands, call.arg("step")
    ndim = len(call.call.result.shape)
    dim = argument_dim(call, ndim)
    size, length = call.result_shape()[dim], call.operand_shape(0)[dim]
    start, _ = _bounds(call.call)

    dims_behind = [0, 0] * (ndim - 1 - dim)
    if step == 1:
        start = _local_place(call, start)
    else:  # every element is the first of a step
        value = value.unsqueeze(dim + 1).constant_pad_nd([*dims_behind, 0, step - 1]).flatten(dim, dim + 1)
    return value.constant_pad_nd([*dims_behind, start, size - start - length * step])


@rule_maker("aten.narrow")
def _narrow(call: OpCall) -> Rule:
    operand = call.operands[0]
    dim = argument_dim(call, len(operand.shape))
    size, start, length = operand.shape[dim], call.arg("start"), call.arg("length")
    start = start + size if start < 0 else start

    def local(program: LocalCall) -> Any:
        return program.run(start=_local_place(program, start), length=_local_place(program, length))

    return cut_rule(call, dim, common_inner_size(size, start, length), linear=[{0}], local=local, free=True)


@rule_maker("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk")
def _split(call: OpCall) -> Rule:
    """`split` and `chunk`: no communication if only the common inner factor of all pieces is sharded."""
    (operand,) = call.operands
    dim = argument_dim(call, len(operand.shape))
    pieces = [meta.shape[dim] for meta in call.results if meta is not None]
    inner = common_inner_size(operand.shape[dim], *itertools.accumulate(pieces))

    def local(program: LocalCall) -> Any:
        sizes = [_local_place(program, piece) for piece in pieces]
        return program.operands[0].split_with_sizes(sizes, dim)

    return cut_rule(call, dim, inner, linear=[{0}], local=local, free=True)


@rule_maker("aten.cat", "aten.concat")
def _cat(call: OpCall) -> Rule | None:
    ndim = len(call.operands[0].shape)
    if any(len(operand.shape) != ndim for operand in call.operands):
        return None  # `cat` also takes empty tensors of one dim, for historical reasons
    dim = argument_dim(call, ndim)
    # Where the inner factor is sharded, every rank joins its parts of all operands: the result is strided.
    inner = common_inner_size(*(operand.shape[dim] for operand in call.operands))
    return cut_rule(call, dim, inner, linear=[set(range(len(call.operands)))])


# One element of a dim (`select`, `select_scatter`), or all of them (`unbind`).
#
# Where the dim is sharded, one rank holds the element. Selected, it is a partial sum in which the others have zeros; if
# it is replaced, that rank writes it.


def _dim_rule(call: OpCall, having: Collection[int], *, split: bool, results: bool = False, **options: Any) -> Rule:
    """A dim that some tensors have and others lack.

    Args:
        call: the call on whole tensors.
        having: the operands that have the dim.
        split: True if it may be sharded, in contiguous stretches.
        results: True if the results have it.
        options: as in `build`.
    """
    sizes = numbered_dims((call.result if results else call.operands[0]).shape)
    long = list(sizes)
    name = long[call.arg("dim")]
    short = [dim for dim in long if dim != name]
    return build(
        sizes,
        [long if position in having else short for position in range(len(call.operands))],
        [long if results else short] * len(call.results),
        whole=[] if split else [name],
        contiguous=[name],
        linear=[set(range(len(call.operands)))],
        uneven=True,
        fill={name: None},  # padding is never the element
        **options,
    )


@rule_maker("aten.select.int")
def _select(call: OpCall) -> Rule:
    # The element is one rank's term of a sum, and booleans cannot be summed.
    adds_up = call.operands[0].dtype is not torch.bool
    return _dim_rule(call, [0], split=adds_up, local=_local_element, free=True)


@rule_maker("aten.select_backward", having=())
@rule_maker("aten.select_scatter", having=(0,))
def _select_put(call: OpCall, having: Collection[int]) -> Rule:
    return _dim_rule(call, having, results=True, split=True, local=_local_element)


def _local_element(call: LocalCall) -> Any:
    """The operator on the rank that holds the element; on others zeros, or the operand if the element is written."""
    shape, whole = _local_full_shape(call), _full(call.call).shape
    dim = argument_dim(call, len(shape))
    owner, place = divmod(call.arg("index") % whole[dim], shape[dim])
    if not call.axes(f"d{dim}"):
        return call.run(index=place, **_local_sizes(call))
    # Others select the same position of their stretches and drop it, since programs do not branch on the rank.
    owned = call.position(f"d{dim}").eq(owner)
    result = call.run(index=place, **_local_sizes(call))
    scatters = call.call.name == "aten::select_scatter"
    return call.emit.where(owned, result, call.operands[0] if scatters else 0)


@rule_maker("aten.unbind")
def _unbind(call: OpCall) -> Rule:
    return _dim_rule(call, [0], split=False, free=True)


@rule_maker("aten.stack")
def _stack(call: OpCall) -> Rule:
    return _dim_rule(call, [], results=True, split=False)


# Padding by a constant: dims that are not padded may be sharded; others where their padding can be split, too.


@rule_maker("aten.constant_pad_nd")
def _pad(call: OpCall) -> Rule:
    """Padding of the last dims: the common inner factor of a dim's size and padding is local."""
    shape, pad = call.operands[0].shape, call.arg("pad")
    ndim = len(shape)
    sizes: dict[str, int] = {}
    source: list[str | list[str]] = []
    target: list[str | list[str]] = []
    for dim, (size, padded) in enumerate(zip(shape, call.result.shape, strict=True)):
        name, at = f"d{dim}", 2 * (ndim - 1 - dim)  # pairs, the last dim's first
        before, after = pad[at : at + 2] or (0, 0)
        if not before and not after:
            sizes[name] = size
            source.append(name)
            target.append(name)
            continue
        # The outer factors of operand and result differ in size, and are whole; the inner factor is in both.
        inner = common_inner_size(size, before, after)
        parts = f"operand_parts{dim}", f"result_parts{dim}"
        sizes |= {name: inner, parts[0]: size // inner, parts[1]: padded // inner}
        source.append([parts[0], name])
        target.append([parts[1], name])
    whole = [name for name in sizes if "parts" in name]

    def local(program: LocalCall) -> Any:
        names = [f"d{ndim - 1 - index // 2}" for index in range(len(pad))]
        return program.run(
            pad=[amount * program.size(name) // sizes[name] for name, amount in zip(names, pad, strict=True)]
        )

    # A number other than zero would be summed once per rank of a partial sum.
    linear: list[set[int]] = [{0}] if call.arg("value") == 0 else []
    return build(sizes, [source], [target], whole=whole, linear=linear, local=local, uneven=True)


# Padding by reflected or repeated positions: dims that are not padded are independent.

_NAMES = [f"aten.{kind}_pad{spatial}d" for kind in ("reflection", "replication") for spatial in (1, 2, 3)]


def _image_dims(call: OpCall) -> tuple[str, str]:
    """Dims of the operand and of the padded image."""
    rank, padding = len(shape_of(call, "self")), call.arg("padding")
    source, padded = [], []
    for dim in range(rank):
        place = 2 * (rank - 1 - dim)  # the padding of the last dim comes first
        whole = any(padding[place : place + 2])
        source.append(f"p{dim}!" if whole else f"d{dim}")
        padded.append(f"q{dim}!" if whole else f"d{dim}")
    return " ".join(source), " ".join(padded)


@rule_maker(*(f"{name}{half}.default" for name in _NAMES for half in ("", "_backward")))
def edge_pad(call: OpCall) -> Rule:
    """The padded image, or the gradient of the operand, which reads only its shape."""
    source, padded = _image_dims(call)
    if call.is_backward:
        return bind_named(call, {"grad_output": padded, "self": source}, [source], linear=[{"grad_output"}])
    return bind_named(call, {"self": source}, [padded], linear=[{"self"}])


# `unfold`: windows over a dim, whose elements become the last dim; and its backward.
#
# Windows without gap or overlap split the dim into two factors, like a view. Otherwise the dim must be whole.


@rule_maker("aten.unfold", "aten.unfold_backward")
def _unfold(call: OpCall) -> Rule | None:
    """No rule where windows of one row are broadcast to all, as in the inverse short-time Fourier transform."""
    backward, full = call.is_backward, _full(call)
    cut = call.operands[0] if backward else call.result
    dim, step = call.arg("dim" if backward else "dimension") % max(1, len(full.shape)), call.arg("step")
    kept = (size == whole for at, (size, whole) in enumerate(zip(cut.shape, full.shape, strict=False)) if at != dim)
    if not all(kept):
        return None
    sizes = numbered_dims(full.shape)
    source: list[str | list[str]] = [*sizes]
    target = [*("windows" if name == f"d{dim}" else name for name in sizes), "window"]
    sizes |= {"windows": cut.shape[dim] if full.shape else 1, "window": cut.shape[-1]}
    whole = [f"d{dim}", "windows", "window"]
    if full.shape and sizes["window"] == step and full.shape[dim] == sizes["windows"] * step:
        source[dim] = ["windows", "window"]
        del sizes[f"d{dim}"]
        whole = []
    operands, results = ([target], [source]) if backward else ([source], [target])
    local = _local_unfold
    return build(sizes, operands, results, whole=whole, linear=[{0}], local=local, free=not backward, uneven=True)


def _local_unfold(call: LocalCall) -> Any:
    # A window is sharded only if its size equals the step.
    changed = dict.fromkeys(("size", "step"), call.size("window")) if call.axes("window") else {}
    return call.run(**_local_sizes(call) | changed)
