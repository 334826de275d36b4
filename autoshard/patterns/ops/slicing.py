"""Parts of dims: slices, selections, padding and windows.

Operators that cut dims or put them together: slice, split, cat, and their backwards.

A dim of size N that is cut at some boundaries has the greatest common divisor g of N and the boundaries as an inner
factor that the cut leaves alone: the cut is one of the outer factor N / g. Sharding g keeps the operator local
(heads inside a fused projection, say); the outer factor can't be sharded. A slice that takes one element of every
`step` leaves alone the outer factor N / step instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import reduce
from typing import Any

import torch

from autoshard.patterns.build import NamedDims, build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import bind_named, shape_of
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule, TensorMeta
from autoshard.size import common_divisor

CUT = "cut"
"""The inner factor of the dim that is cut."""


def cut_rule(
    call: OpCall, dim: int, inner: int, *, linear: Sequence[set[int]] = (), local: Any = None, free: bool = False
) -> Rule:
    """Every tensor of the call has the same dims but for `dim`, of which `inner` is a common inner factor."""
    sizes: dict[str, int] = {CUT: inner}
    whole: list[str] = []

    def name_dims(place: str, meta: TensorMeta) -> list[list[str]]:
        dims = [[f"d{index}"] for index in range(len(meta.shape))]
        outer = f"{place}_parts"
        dims[dim] = [outer, CUT]
        sizes.update({f"d{index}": size for index, size in enumerate(meta.shape) if index != dim})
        sizes[outer] = meta.shape[dim] // inner
        whole.append(outer)
        if meta.shape[dim] == 0:
            whole.append(CUT)  # nothing is left that could be sharded
        return dims

    operands = [name_dims(f"operand{position}", meta) for position, meta in enumerate(call.operands)]
    results = [
        None if meta is None else name_dims(f"result{position}", meta) for position, meta in enumerate(call.results)
    ]
    return build(sizes, operands, results, whole=whole, linear=linear, local=local, free=free, uneven=True)


def common_inner_size(*boundaries: int) -> int:
    """The inner factor that cuts at these boundaries leave alone; 1 where everything is empty."""
    return reduce(common_divisor, boundaries, 0) or 1


def _dim(call: OpCall, ndim: int) -> int:
    return int(call.arg("dim")) % ndim


def _bounds(call: OpCall, size: int) -> tuple[int, int]:
    """Start and end of a slice of a dim of `size`, as numbers from 0 to size."""
    start, end = call.arg("start"), call.arg("end")
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    return start, min(max(end + size if end < 0 else end, start), size)


def _slice_rule(call: OpCall, whole: TensorMeta, linear: Sequence[set[int]], free: bool) -> Rule:
    """A slice of `whole`, or the reverse; with a step that does not divide the dim, the dim stays whole."""
    dim = _dim(call, len(whole.shape))
    size = whole.shape[dim]
    start, end = _bounds(call, size)
    step = call.arg("step")
    if step == 1:
        return cut_rule(call, dim, common_inner_size(size, start, end), linear=linear, local=_local_slice, free=free)
    if start < step and size % step == 0 and end - start > size - step:
        return _strided_slice_rule(call, whole, dim, step, linear=linear, free=free)
    return cut_rule(call, dim, 1, linear=linear, free=free, local=_run_with_local_sizes)


def _strided_slice_rule(call: OpCall, whole: TensorMeta, dim: int, step: int, **options: Any) -> Rule:
    """One element of every `step`: the dim is (groups, step) in the whole tensor and (groups) in the slice."""
    sizes = {f"d{index}": size for index, size in enumerate(whole.shape)}
    sizes |= {CUT: sizes.pop(f"d{dim}") // step, "step": step}
    dims = [[CUT, "step"] if index == dim else [f"d{index}"] for index in range(len(whole.shape))]
    sliced = [[CUT] if index == dim else names for index, names in enumerate(dims)]

    def dims_of(meta: TensorMeta | None) -> list[list[str]]:
        return dims if meta is not None and meta.shape == whole.shape else sliced

    operands, results = [dims_of(meta) for meta in call.operands], [dims_of(meta) for meta in call.results]
    return build(sizes, operands, results, whole=["step"], local=_local_strided_slice, uneven=True, **options)


def _local_strided_slice(call: LocalCall) -> Any:
    """The same slice of the local dim, to its end."""
    backward = call.call.op._schema.name == "aten::slice_backward"
    shape = call.result_shape() if backward else call.operand_shape(0)
    whole = call.call.results[0] if backward else call.call.operands[0]
    assert whole is not None
    dim = _dim(call.call, len(shape))
    start, _ = _bounds(call.call, whole.shape[dim])
    return call.run(start=start, end=shape[dim], **({"input_sizes": list(shape)} if backward else {}))


def _run_with_local_sizes(call: LocalCall) -> Any:
    """The operator with its sizes made local, if it takes any."""
    names = [argument.name for argument in call.call.op._schema.arguments]
    return call.run(input_sizes=list(call.result_shape())) if "input_sizes" in names else call.run()


def _local_slice(call: LocalCall) -> Any:
    """The slice with start and end in the local dim."""
    backward = call.call.op._schema.name == "aten::slice_backward"
    whole = call.call.results[0] if backward else call.call.operands[0]
    assert whole is not None
    start, end = _bounds(call.call, whole.shape[_dim(call.call, len(whole.shape))])
    sizes = {"input_sizes": list(call.result_shape())} if backward else {}
    return call.run(start=_local_place(call, start), end=_local_place(call, end), **sizes)


def slice_backward_by_padding(call: LocalCall) -> Any:
    """`aten.slice_backward` by padding what was a slice of a dim with zeros, whatever the sizes of the other dims."""
    (value,), emit, step = call.operands, call.emit, call.arg("step")
    (whole,) = call.call.results
    assert whole is not None
    dim, ndim = _dim(call.call, len(whole.shape)), len(whole.shape)
    size, length = call.result_shape()[dim], call.operand_shape(0)[dim]
    start, _ = _bounds(call.call, whole.shape[dim])

    def pad_dim(tensor: Any, dims_behind: int, before: int, behind: int) -> Any:
        return emit.constant_pad_nd(tensor, [0, 0] * dims_behind + [before, behind])

    if step == 1:
        start = _local_place(call, start)
    else:  # every element is the first of a step
        value = emit.unsqueeze(value, dim + 1)
        value = pad_dim(value, ndim - 1 - dim, 0, step - 1)
        value = emit.flatten(value, dim, dim + 1)
    return pad_dim(value, ndim - 1 - dim, start, size - start - length * step)


def _local_place(call: LocalCall, place: int) -> int:
    """A place in the dim that is cut, between steps of the outer factor, as it counts in the local dim."""
    inner = math.prod(call.rule.factors[index].size for index in call.rule.indices(CUT))
    return place // inner * call.size(CUT)


@rule_maker("aten.slice.Tensor")
def _slice(call: OpCall) -> Rule:
    return _slice_rule(call, call.operands[0], [{0}], free=True)


@rule_maker("aten.slice_backward")
def _slice_backward(call: OpCall) -> Rule:
    assert call.results[0] is not None
    return _slice_rule(call, call.results[0], [{0}], free=False)


@rule_maker("aten.slice_scatter")
def _slice_scatter(call: OpCall) -> Rule:
    return _slice_rule(call, call.operands[0], [{0, 1}], free=False)


@rule_maker("aten.narrow")
def _narrow(call: OpCall) -> Rule:
    operand = call.operands[0]
    dim = _dim(call, len(operand.shape))
    size, start, length = operand.shape[dim], call.arg("start"), call.arg("length")
    start = start + size if start < 0 else start

    def local(program: LocalCall) -> Any:
        return program.run(start=_local_place(program, start), length=_local_place(program, length))

    return cut_rule(call, dim, common_inner_size(size, start, length), linear=[{0}], local=local, free=True)


@rule_maker("aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.chunk")
def _split(call: OpCall) -> Rule:
    """Pieces of a dim: local where the factor inside all of them is sharded."""
    (operand,) = call.operands
    dim = _dim(call, len(operand.shape))
    pieces = [meta.shape[dim] for meta in call.results if meta is not None]
    inner = common_inner_size(operand.shape[dim], *itertools.accumulate(pieces))

    def local(program: LocalCall) -> Any:
        sizes = [_local_place(program, piece) for piece in pieces]
        return program.emit.split_with_sizes(program.operands[0], sizes, dim)

    return cut_rule(call, dim, inner, linear=[{0}], local=local, free=True)


@rule_maker("aten.cat", "aten.concat")
def _cat(call: OpCall) -> Rule | None:
    ndim = len(call.operands[0].shape)
    if any(len(operand.shape) != ndim for operand in call.operands):
        return None  # an empty tensor of one dim may be among the others, for historical reasons
    dim = _dim(call, ndim)
    inner = common_inner_size(*(operand.shape[dim] for operand in call.operands))
    return cut_rule(call, dim, inner, linear=[set(range(len(call.operands)))])


# One element of a dim: taken out, put back, or all of them.
#
# Where the dim is sharded, one rank holds the element. Taken out, it is a partial sum in which the others have zeros;
# put back, it is that rank's to write.


def _dim_rule(
    call: OpCall, having: Collection[int], results: bool, linear: Sequence[set[int]], *, split: bool, **options: Any
) -> Rule:
    """A dim that some tensors have and others lack.

    Args:
        having: the operands that have the dim.
        results: whether the results have it.
        split: whether it may be sharded, in whole stretches.
    """
    full = call.results[0] if results else call.operands[0]
    assert full is not None
    dim = call.arg("dim") % len(full.shape)
    sizes = {f"d{index}": size for index, size in enumerate(full.shape)}
    long = [[name] for name in sizes]
    short = long[:dim] + long[dim + 1 :]
    operands = [long if position in having else short for position in range(len(call.operands))]
    targets = [long if results else short] * len(call.results)
    name = [f"d{dim}"]
    options |= {"uneven": True, "fill": dict.fromkeys(name)}  # padding is never the element
    return build(sizes, operands, targets, whole=[] if split else name, contiguous=name, linear=linear, **options)


@rule_maker("aten.select.int")
def _select(call: OpCall) -> Rule:
    adds_up = call.operands[0].dtype is not torch.bool
    return _dim_rule(call, [0], False, [{0}], split=adds_up, local=_local_select, free=True)


def _locate_element(call: LocalCall, shape: Sequence[int], whole: Sequence[int]) -> tuple[int, Any]:
    """The element's index in the local dim of the rank that holds it, and whether this rank does; None if all do."""
    dim = call.arg("dim") % len(shape)
    index = call.arg("index") % whole[dim]
    if not call.axes(f"d{dim}"):
        return index, None
    owner, place = divmod(index, shape[dim])
    return place, call.emit.eq(call.position(f"d{dim}"), owner)


def _local_select(call: LocalCall) -> Any:
    place, owned = _locate_element(call, call.operand_shape(0), call.call.operands[0].shape)
    element = call.run(index=place)
    return element if owned is None else call.emit.where(owned, element, 0)


@rule_maker("aten.select_backward")
def _select_backward(call: OpCall) -> Rule:
    return _dim_rule(call, [], True, [{0}], split=True, local=_local_select_backward)


def _local_select_backward(call: LocalCall) -> Any:
    shape = call.result_shape()
    assert call.call.results[0] is not None
    place, owned = _locate_element(call, shape, call.call.results[0].shape)
    gradient = call.run(index=place, input_sizes=list(shape))
    return gradient if owned is None else call.emit.where(owned, gradient, 0)


@rule_maker("aten.select_scatter")
def _select_scatter(call: OpCall) -> Rule:
    return _dim_rule(call, [0], True, [{0, 1}], split=True, local=_local_select_scatter)


def _local_select_scatter(call: LocalCall) -> Any:
    place, owned = _locate_element(call, call.operand_shape(0), call.call.operands[0].shape)
    written = call.run(index=place)
    return written if owned is None else call.emit.where(owned, written, call.operands[0])


@rule_maker("aten.unbind")
def _unbind(call: OpCall) -> Rule:
    return _dim_rule(call, [0], False, [{0}], split=False, free=True)


@rule_maker("aten.stack")
def _stack(call: OpCall) -> Rule:
    return _dim_rule(call, [], True, [set(range(len(call.operands)))], split=False)


# Padding by a constant: dims that are not padded are free, and others where their padding can be split, too.


def _padding(pad: Sequence[int], ndim: int, dim: int) -> tuple[int, int]:
    """Padding before and after a dim; `pad` counts from the last dim."""
    index = 2 * (ndim - 1 - dim)
    return (pad[index], pad[index + 1]) if index < len(pad) else (0, 0)


@rule_maker("aten.constant_pad_nd")
def _pad(call: OpCall) -> Rule:
    """Padding of the last dims: of each, the factor inside size and padding stays local."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    ndim = len(operand.shape)
    pad = call.arg("pad")
    sizes: dict[str, int] = {}
    source, target, whole = [], [], []
    for dim, size in enumerate(operand.shape):
        before, after = _padding(pad, ndim, dim)
        inner = common_inner_size(size, before, after)
        sizes |= {f"d{dim}": inner, f"operand_parts{dim}": size // inner}
        sizes[f"result_parts{dim}"] = result.shape[dim] // inner
        if before or after:
            whole += [f"operand_parts{dim}", f"result_parts{dim}"]
        else:
            inner = size
            sizes |= {f"d{dim}": size, f"operand_parts{dim}": 1, f"result_parts{dim}": 1}
        source.append([f"operand_parts{dim}", f"d{dim}"])
        target.append([f"result_parts{dim}", f"d{dim}"])

    def local(program: LocalCall) -> Any:
        names = [f"d{ndim - 1 - index // 2}" for index in range(len(pad))]
        return program.run(
            pad=[amount * program.size(name) // sizes[name] for name, amount in zip(names, pad, strict=True)]
        )

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


@rule_maker(*(f"{name}.default" for name in _NAMES))
def edge_pad(call: OpCall) -> Rule:
    """Forward."""
    source, padded = _image_dims(call)
    return bind_named(call, {"self": source}, [padded], linear=[{"self"}])


@rule_maker(*(f"{name}_backward.default" for name in _NAMES))
def edge_pad_backward(call: OpCall) -> Rule:
    """The gradient of the operand, of which only the shape is looked at."""
    source, padded = _image_dims(call)
    return bind_named(call, {"grad_output": padded, "self": source}, [source], linear=[{"grad_output"}])


# Windows over a dim, whose elements become the last dim, and the way back.
#
# Windows that follow each other without gap or overlap cut the dim in two factors, like a view. Others share
# elements: then the dim must be whole.


def _window_dims(
    full: TensorMeta, cut: TensorMeta, dim: int, step: int
) -> tuple[dict[str, int], NamedDims, NamedDims, list[str]]:
    """Sizes, the dims of the whole tensor and of its windows, and what can't be sharded."""
    sizes = {f"d{index}": size for index, size in enumerate(full.shape)}
    sizes |= {"windows": cut.shape[dim] if full.shape else 1, "window": cut.shape[-1]}
    source = [[f"d{index}"] for index in range(len(full.shape))]
    target = [["windows"] if index == dim else names for index, names in enumerate(source)] + [["window"]]
    if full.shape and sizes["window"] == step and full.shape[dim] == sizes["windows"] * step:
        source[dim] = ["windows", "window"]
        del sizes[f"d{dim}"]
        return sizes, source, target, []
    return sizes, source, target, [f"d{dim}", "windows", "window"]


@rule_maker("aten.unfold")
def _unfold(call: OpCall) -> Rule:
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    dim = call.arg("dimension") % max(1, len(operand.shape))
    sizes, source, target, whole = _window_dims(operand, result, dim, call.arg("step"))

    def local(program: LocalCall) -> Any:
        return program.run(**_local_window(program))

    return build(sizes, [source], [target], whole=whole, linear=[{0}], local=local, free=True, uneven=True)


def _local_window(call: LocalCall) -> dict[str, Any]:
    """Size of the local windows, and the step between them; a window is sharded only where the step is its size."""
    size = call.size("window") if call.axes("window") else call.arg("size")
    return {"size": size, "step": size if call.axes("window") else call.arg("step")}


@rule_maker("aten.unfold_backward")
def _unfold_backward(call: OpCall) -> Rule | None:
    """None where windows of one row are broadcast to all, as the inverse of a Fourier transform does with its own."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    dim = call.arg("dim") % max(1, len(result.shape))
    if any(own != whole for at, (own, whole) in enumerate(zip(operand.shape, result.shape, strict=False)) if at != dim):
        return None
    sizes, source, target, whole = _window_dims(result, operand, dim, call.arg("step"))

    def local(program: LocalCall) -> Any:
        return program.run(input_sizes=list(program.result_shape()), **_local_window(program))

    return build(sizes, [target], [source], whole=whole, linear=[{0}], local=local, uneven=True)
