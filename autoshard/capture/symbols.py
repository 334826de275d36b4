"""Torch's symbols for dynamic sizes: removed from a traced graph, and put back into one to be traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture._torch import FakeTensorMode, symbolic, symbolic_conditions, symbolic_hint
from autoshard.capture.dynamic import DynamicSizes, linear_form
from autoshard.errors import CaptureError
from autoshard.size import DynamicSize, Ratio, Sizes, symbol


def with_sizes(
    graph: fx.Graph, inputs: Sequence[tuple[str, fx.Node]], names: Mapping[str, Mapping[int, str]]
) -> DynamicSizes:
    """Replace the symbols of a traced joint graph by dynamic sizes.

    Afterwards fake tensors have the example's shapes, `meta["sizes"]` contains shapes with dynamic sizes, and arguments
    computed from sizes are `DynamicSize`s and `Ratio`s.

    Args:
        graph: the graph; changed in place.
        inputs: names and placeholders of the inputs.
        names: the caller's names of the dims.

    Raises:
        CaptureError: the model decides by dynamic sizes in a way that no expression represents.
    """
    mode = inputs[0][1].meta["val"].fake_mode
    symbols: dict[Any, sympy.Symbol] = {}
    example: dict[sympy.Symbol, int] = {}
    dims: dict[str, dict[int, sympy.Expr]] = {}
    for name, node in inputs:
        for dim, declared in names.get(name, {}).items():
            size = node.meta["val"].shape[dim]
            # A dim declared as a multiple has an expression of one symbol.
            (torch_symbol,) = size.node.expr.free_symbols
            symbols[torch_symbol] = symbol(declared)
            dims.setdefault(name, {})[dim] = size
    # A second pass, because torch may express a size by the symbol of another input.
    for sizes in dims.values():
        for dim, size in sizes.items():
            sizes[dim] = expression_of(size, symbols)
            size_symbol, constant, factor = linear_form(sizes[dim])
            example[size_symbol] = (symbolic_hint(size) - constant) // factor
    numbers: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: numbers.get(operand, operand))
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
    # Users before their operands.
    for node in reversed(numbers):
        graph.erase_node(node)
    ranges, conditions = symbolic_conditions(mode, symbols)
    translated = dict.fromkeys(_translate(condition, symbols) for condition in conditions)
    return DynamicSizes(dims, ranges, tuple(condition for condition in translated if condition != sympy.true), example)


def expression_of(value: torch.SymInt | torch.SymFloat, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    """Return torch's symbolic number as an expression of `symbols` and sympy's functions."""
    return _translate(value.node.expr, symbols)


def _translate(expr: sympy.Expr, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    # torch has its own functions for divisions and powers, which sympy cannot simplify.
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
    """Set `meta["val"]` to static fake tensors, and `meta["sizes"]` to dynamic shapes, if any."""
    several = isinstance(node.meta.get("val"), (tuple, list))
    values = list(node.meta["val"]) if several else [node.meta.get("val")]
    shapes: list[tuple[int, ...] | None] = []
    for place, value in enumerate(values):
        shape = None
        if isinstance(value, torch.Tensor):
            shape = tuple(_number(size, symbols, example) for size in value.shape)
            if any(isinstance(size, DynamicSize) for size in shape):
                # Torch's strides are expressions, too; those of the example suffice.
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
