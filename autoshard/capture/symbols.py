"""Torch's symbols for dynamic sizes, taken out of a traced graph: what depends on them becomes `Size`s and `Ratio`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture._torch import FakeTensorMode, symbolic, symbolic_conditions, symbolic_hint
from autoshard.capture.dynamic import DynamicSizes
from autoshard.errors import CaptureError
from autoshard.size import DynamicSize, Ratio, Sizes, symbol


def with_sizes(
    graph: fx.Graph, inputs: Sequence[tuple[str, fx.Node]], names: Mapping[str, Mapping[int, str]]
) -> DynamicSizes:
    """Take the symbols out of a traced joint graph.

    Afterwards fake tensors have the example's shapes, `meta["sizes"]` beside them holds the shapes in which a size is
    dynamic, and arguments that were computed from sizes are `Size`s and `Ratio`s.

    Args:
        graph: the graph; changed in place.
        inputs: names and placeholders of the inputs.
        names: what the caller called the dims.

    Raises:
        CaptureError: the model takes a decision on dynamic sizes that no expression holds.
    """
    mode = inputs[0][1].meta["val"].fake_mode
    symbols: dict[Any, sympy.Symbol] = {}
    example: dict[sympy.Symbol, int] = {}
    dims: dict[str, dict[int, sympy.Expr]] = {}
    for name, node in inputs:
        for dim, said in names.get(name, {}).items():
            (own,) = node.meta["val"].shape[dim].node.expr.free_symbols
            symbols[own] = symbol(said)
            dims.setdefault(name, {})[dim] = node.meta["val"].shape[dim]
    for own_dims in dims.values():
        for dim, size in own_dims.items():
            expr = expression_of(size, symbols)
            (own,) = expr.free_symbols
            example[own] = (symbolic_hint(size) - int(expr.subs(own, 0))) // int(expr.coeff(own, 1))
            own_dims[dim] = expr
    numbers: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda one: numbers.get(one, one))
        value = node.meta.get("val")
        if isinstance(value, torch.SymBool):
            if node.users:
                raise CaptureError(
                    f"forward computes with whether {value}, which dynamic sizes decide: the graph would be that of "
                    "the example alone. Compare tensors, or leave a size out of dynamic."
                )
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            kind = DynamicSize if isinstance(value, torch.SymInt) else Ratio
            numbers[node] = kind.of(expression_of(value, symbols), example)
        elif node.op != "output":
            _set_metadata(node, symbols, example, mode)
    for node in reversed(numbers):
        graph.erase_node(node)
    ranges, conditions = symbolic_conditions(mode, symbols)
    translated = dict.fromkeys(_translate(condition, symbols) for condition in conditions)
    return DynamicSizes(dims, ranges, tuple(one for one in translated if one != sympy.true), example)


def expression_of(value: torch.SymInt | torch.SymFloat, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    """One of torch's symbolic numbers in terms of ours: in functions of sympy's, its symbols replaced."""
    return _translate(value.node.expr, symbols)


def _translate(expr: sympy.Expr, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    expr = expr.xreplace(symbols)
    for function, ours in (
        (symbolic.FloorDiv, lambda a, b: sympy.floor(a / b)),
        (symbolic.CleanDiv, lambda a, b: a / b),
        (symbolic.CeilDiv, lambda a, b: sympy.ceiling(a / b)),
        (symbolic.ToFloat, lambda a: a),
        (symbolic.FloatPow, lambda a, b: a**b),
        (symbolic.FloatTrueDiv, lambda a, b: a / b),
        (symbolic.IntTrueDiv, lambda a, b: a / b),
    ):
        expr = expr.replace(function, ours)
    return expr


def _set_metadata(node: fx.Node, symbols: Mapping[Any, sympy.Symbol], example: Sizes, mode: FakeTensorMode) -> None:
    """Static fakes in `meta["val"]`, and dynamic shapes in `meta["sizes"]` where there are any."""
    several = isinstance(node.meta.get("val"), (tuple, list))
    values = list(node.meta["val"]) if several else [node.meta.get("val")]
    shapes: list[tuple[int, ...] | None] = []
    for place, value in enumerate(values):
        shape = None
        if isinstance(value, torch.Tensor):
            shape = tuple(_number(size, symbols, example) for size in value.shape)
            if any(isinstance(size, DynamicSize) for size in shape):
                strides = [int(_number(stride, symbols, example)) for stride in value.stride()]
                with mode:
                    values[place] = torch.empty_strided(
                        [int(size) for size in shape], strides, dtype=value.dtype, device=value.device
                    )
        shapes.append(shape)
    if any(isinstance(size, DynamicSize) for shape in shapes for size in shape or ()):
        node.meta["val"] = values if several else values[0]
        node.meta["sizes"] = tuple(shapes)


def _number(size: int | torch.SymInt, symbols: Mapping[Any, sympy.Symbol], example: Sizes) -> int:
    return DynamicSize.of(expression_of(size, symbols), example) if isinstance(size, torch.SymInt) else size
