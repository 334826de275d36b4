"""Views: operators that give a tensor's elements another shape or order, or the same."""

from __future__ import annotations

import math
from typing import Any

import torch

from autoshard.patterns.build import build
from autoshard.patterns.local import LocalCall
from autoshard.patterns.registry import rule, rule_maker
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.view_factors import view_rule

rule_maker(
    "aten.view.default",
    "aten._unsafe_view",
    "aten.reshape",
    "aten._reshape_alias",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.squeeze",
    "aten.unsqueeze",
)(view_rule)

rule(["aten.alias", "aten.detach", "aten.lift_fresh"], "... -> ...", linear="0", free=True)
rule(["aten.clone", "aten.contiguous", "aten.lift", "aten.lift_fresh_copy"], "... -> ...", linear="0")


@rule_maker("aten.view.dtype")
def _view_dtype(call: OpCall) -> Rule:
    """Other elements in the same bytes: the last dim stays whole when the elements have another size."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    names = [f"d{index}" for index in range(len(operand.shape))]
    sizes = dict(zip(names, operand.shape, strict=True))
    if operand.shape == result.shape:
        return build(sizes, [[[name] for name in names]], [[[name] for name in names]], free=True)
    sizes["bytes"] = result.shape[-1]
    dims = [[name] for name in names]
    return build(sizes, [dims], [[*dims[:-1], ["bytes"]]], whole=[names[-1], "bytes"], free=True)


@rule_maker("aten._to_copy", "aten.to.dtype", "prims.convert_element_type")
def _to_copy(call: OpCall) -> Rule:
    """Another dtype: linear among floating and complex ones."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    inexact = all(dtype.is_floating_point or dtype.is_complex for dtype in (operand.dtype, result.dtype))
    names = [f"d{index}" for index in range(len(operand.shape))]
    dims = [[name] for name in names]
    return build(dict(zip(names, operand.shape, strict=True)), [dims], [dims], linear=[{0}] if inexact else [])


def _order(call: OpCall) -> tuple[int, ...]:
    """For every dim of the result of a permute, transpose or t, the dim of the operand that it is."""
    ndim = len(call.operands[0].shape)
    order = list(range(ndim))
    name = call.op._schema.name
    if name == "aten::permute":
        return tuple(dim % ndim for dim in call.arg("dims"))
    if name == "aten::transpose":
        first, second = (call.arg("dim0"), call.arg("dim1")) if ndim else (0, 0)
    else:
        first, second = 0, ndim - 1
    if ndim:
        order[first], order[second] = order[second], order[first]
    return tuple(order)


@rule_maker("aten.permute", "aten.transpose.int", "aten.t")
def _permute(call: OpCall) -> Rule:
    (operand,) = call.operands
    names = [f"d{index}" for index in range(len(operand.shape))]
    target = [[names[dim]] for dim in _order(call)]
    sizes = dict(zip(names, operand.shape, strict=True))
    return build(sizes, [[[name] for name in names]], [target], linear=[{0}], free=True)


def _expansion_rule(call: OpCall, grown_by: str, keeps: bool) -> Rule:
    """A result whose dims are (new, old), aligned to the right: `new` is a factor that only the result has."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    offset = len(result.shape) - len(operand.shape)
    sizes: dict[str, int] = {}
    target = []
    for dim, size in enumerate(result.shape):
        old = operand.shape[dim - offset] if dim >= offset else 1
        sizes[f"new{dim}"] = size // old if old else 1
        if dim >= offset:
            sizes[f"d{dim - offset}"] = old
        target.append([f"new{dim}", f"d{dim - offset}"] if dim >= offset else [f"new{dim}"])
    source = [[f"d{dim}"] for dim in range(len(operand.shape))]

    def local(program: LocalCall) -> Any:
        shape = program.result_shape()
        if keeps:
            return program.run(**{grown_by: list(shape)})
        return program.run(**{grown_by: [program.size(f"new{dim}") for dim in range(ndim)]})

    ndim = len(result.shape)
    return build(sizes, [source], [target], linear=[{0}], local=local, free=keeps, uneven=True)


@rule_maker("aten.expand")
def _expand(call: OpCall) -> Rule:
    """Dims of size one repeated: the repetition is a factor that only the result has (as in grouped queries)."""
    return _expansion_rule(call, "size", keeps=True)


@rule_maker("aten.repeat")
def _repeat(call: OpCall) -> Rule | None:
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    return (
        _expansion_rule(call, "repeats", keeps=False) if math.prod(operand.shape) and math.prod(result.shape) else None
    )


@rule_maker("aten.roll", "aten.flip")
def _roll_flip(call: OpCall) -> Rule:
    return _same_dims_rule(call, call.arg("dims") or tuple(range(len(call.operands[0].shape))))


@rule_maker("aten.rot90")
def _rot90(call: OpCall) -> Rule:
    """A quarter turn in the plane of two dims, which must be whole; the result has them swapped after an odd number."""
    (operand,) = call.operands
    names = [f"d{index}" for index in range(len(operand.shape))]
    first, second = (dim % len(names) for dim in call.arg("dims"))
    target = list(names)
    if call.arg("k") % 2:
        target[first], target[second] = names[second], names[first]
    return build(
        dict(zip(names, operand.shape, strict=True)),
        [[[name] for name in names]],
        [[[name] for name in target]],
        whole=[names[first], names[second]],
        linear=[{0}],
    )


def _same_dims_rule(call: OpCall, dims: tuple[int, ...]) -> Rule:
    """Dims stay where they are; those in `dims` must be whole. Linear."""
    shape = call.operands[0].shape
    names = [f"d{index}" for index in range(len(shape))]
    named = [[name] for name in names]
    return build(
        dict(zip(names, shape, strict=True)), [named], [named], whole=[names[dim] for dim in dims], linear=[{0}]
    )


@rule_maker("aten.view_as_real", "aten.view_as_complex")
def _complex(call: OpCall) -> Rule:
    """Real and imaginary part are a last dim of two, which stays whole."""
    (operand,), (result,) = call.operands, call.results
    assert result is not None
    shape = min(operand.shape, result.shape, key=len)
    names = [f"d{index}" for index in range(len(shape))]
    dims = [[name] for name in names]
    parts = [*dims, ["part"]]
    real = call.op == torch.ops.aten.view_as_real.default
    sizes = dict(zip(names, shape, strict=True)) | {"part": 2}
    source, target = (dims, parts) if real else (parts, dims)
    return build(sizes, [source], [target], whole=["part"], linear=[{0}], free=True)
