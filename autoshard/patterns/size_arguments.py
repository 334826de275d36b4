"""Which dims an operator is told the size of, and how it is told another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.patterns._torch import OpOverload
from autoshard.patterns.rule import OpCall, Rule
from autoshard.size import DynamicSize

aten = torch.ops.aten

_NO_SIZE_ARGUMENTS = frozenset(
    {
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.nll_loss_forward.default,
        aten.nll_loss_backward.default,
        aten.nll_loss2d_forward.default,
        aten.nll_loss2d_backward.default,
        aten.new_empty_strided.default,  # its strides are those of the whole tensor, and nothing depends on them
    }
)
"""Operators none of whose arguments is a size that `set_size_arguments` does not say: others are places."""

_SPATIAL = frozenset({aten.convolution.default, aten.convolution_backward.default})

_RANGE_END_ARGUMENT = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
"""Which argument of a range of whole numbers from zero on is the size of it."""

_ROW_COUNT_ARGUMENT = "num_weights"
"""The argument of the gradient of a table that is the number of its rows."""


def factors_with_size_arguments(call: OpCall, rule: Rule) -> Iterator[int]:
    """The factors of a rule whose sizes a call is told, but for those that `set_size_arguments` says otherwise."""
    arguments = call.op._schema.arguments
    if not call.operands:
        if not any(map(_is_shape, arguments)) and not _is_plain_range(call):
            yield from range(len(rule.factors))  # such as `linspace`
        return
    given = {argument.name for argument in arguments[: len(call.args)]} | dict(call.kwargs).keys()
    if call.op in _NO_SIZE_ARGUMENTS or not given.intersection(one.name for one in arguments if _is_size(one)):
        return
    names = {argument.name for argument in arguments}
    tensors = [*rule.operands, *(dims for dims in rule.results if dims is not None)]
    ndim = max(map(len, tensors))
    if call.op is aten.repeat.default or ("dim" in names and isinstance(call.arg("dim"), int)):
        tensors = [dims for dims in tensors if len(dims) == ndim]  # those that have the dims that are told of
    for dims in tensors:
        for place in _size_dims(call, ndim):
            if place < len(dims):
                yield from dims[place]


def set_size_arguments(node: fx.Node, results: Sequence[tuple[int, ...] | None]) -> None:
    """Put the sizes of results in the place of the numbers among a node's arguments that they are."""
    assert isinstance(node.target, OpOverload)
    shape = results[0]
    if shape is None or not any(isinstance(size, DynamicSize) for size in shape):
        return
    if node.target in _RANGE_END_ARGUMENT:
        node.update_arg(_RANGE_END_ARGUMENT[node.target], shape[0])
        return
    if node.target is aten.repeat.default:
        own = _prepend_ones(node.args[0].meta["val"].shape, len(shape))  # type: ignore[union-attr]
        repeats = zip(own, shape, node.args[1], strict=True)  # type: ignore[arg-type]
        node.update_arg(1, [size if one == 1 else times for one, size, times in repeats])
        return
    for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
        if _is_shape(argument):
            node.update_arg(place, list(shape))
        elif argument.name == _ROW_COUNT_ARGUMENT:
            node.update_arg(place, shape[0])


def sets_result_sizes(node: fx.Node) -> bool:
    """Whether `set_size_arguments` says anew what size the dims are that an operator makes."""
    assert isinstance(node.target, OpOverload)
    said = (_is_shape(argument) or argument.name == _ROW_COUNT_ARGUMENT for argument in node.target._schema.arguments)
    return node.target is aten.repeat.default or any(said)


def _size_dims(call: OpCall, ndim: int) -> Sequence[int]:
    """The dims of a call's tensors that its arguments tell a size or a place of, as far as they say which."""
    names = {argument.name for argument in call.op._schema.arguments}
    if call.op in _SPATIAL:
        return range(2, ndim)
    if "normalized_shape" in names:
        return range(ndim - len(call.arg("normalized_shape")), ndim)
    if "dim" in names and isinstance(call.arg("dim"), int):
        return (call.arg("dim") % ndim,)
    if call.op is aten.constant_pad_nd.default:  # pairs, the last dim's first; no padding tells nothing
        pads = call.arg("pad")
        return [dim for dim in range(ndim) if any(pads[2 * (ndim - 1 - dim) : 2 * (ndim - dim)])]
    if call.op is aten.roll.default and call.arg("dims"):
        return [dim % ndim for dim in call.arg("dims")]
    if call.op is aten.repeat.default:  # of what is of size 1, so many times is the size
        times = zip(_prepend_ones(call.operands[0].shape, ndim), call.arg("repeats"), strict=True)
        return [dim for dim, each in enumerate(times) if min(each) > 1]
    return range(ndim)


def _is_plain_range(call: OpCall) -> bool:
    """Whether a call makes the whole numbers from zero on, one by one."""
    if call.op not in _RANGE_END_ARGUMENT or not isinstance(call.arg("end"), int):
        return False
    names = {argument.name for argument in call.op._schema.arguments}
    return all(call.arg(name) == begin for name, begin in (("start", 0), ("step", 1)) if name in names)


def _is_shape(argument: Any) -> bool:
    """Whether an argument is the shape of the result."""
    return argument.name in ("size", "input_sizes") and argument.real_type.kind() == "ListType"


def _is_size(argument: Any) -> bool:
    """Whether an argument may be a size, as its type says: dims and flags are plain integers."""
    kind = argument.real_type
    while kind.kind() in ("ListType", "OptionalType"):
        kind = kind.getElementType()
    return bool(kind.kind() == "SymIntType") and not _is_shape(argument)


def _prepend_ones(shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    """A shape with dims of size 1 before it."""
    return (1,) * (ndim - len(shape)) + tuple(shape)
