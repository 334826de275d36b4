"""Torch's symbols for dynamic sizes, taken out of a traced graph, and put back into one that is to be traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture._torch import FakeTensorMode, symbolic, symbolic_conditions, symbolic_hint, symbolic_integer
from autoshard.capture.dynamic import DynamicSizes, linear_form
from autoshard.capture.export import Exported
from autoshard.errors import CaptureError
from autoshard.size import DynamicSize, Ratio, Sizes, plain, symbol


def with_sizes(
    graph: fx.Graph, inputs: Sequence[tuple[str, fx.Node]], names: Mapping[str, Mapping[int, str]]
) -> DynamicSizes:
    """Take the symbols out of a traced joint graph.

    Afterwards fake tensors have the example's shapes, `meta["sizes"]` beside them holds shapes with dynamic sizes, and
    arguments that were computed from sizes are `DynamicSize`s and `Ratio`s.

    Args:
        graph: the graph; changed in place.
        inputs: names and placeholders of the inputs.
        names: the caller's names of the dims.

    Raises:
        CaptureError: the model takes a decision on dynamic sizes that no expression holds.
    """
    mode = inputs[0][1].meta["val"].fake_mode
    symbols: dict[Any, sympy.Symbol] = {}
    example: dict[sympy.Symbol, int] = {}
    dims: dict[str, dict[int, sympy.Expr]] = {}
    for name, node in inputs:
        for dim, declared in names.get(name, {}).items():
            size = node.meta["val"].shape[dim]
            # A dim that was declared as a multiple has an expression of one symbol.
            (torch_symbol,) = size.node.expr.free_symbols
            symbols[torch_symbol] = symbol(declared)
            dims.setdefault(name, {})[dim] = size
    # A second pass, since torch may express a size by the symbol of another input.
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
    # Users before what they use.
    for node in reversed(numbers):
        graph.erase_node(node)
    ranges, conditions = symbolic_conditions(mode, symbols)
    translated = dict.fromkeys(_translate(condition, symbols) for condition in conditions)
    return DynamicSizes(dims, ranges, tuple(condition for condition in translated if condition != sympy.true), example)


def expression_of(value: torch.SymInt | torch.SymFloat, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    """Return a symbolic number of torch as an expression of `symbols` and sympy's functions."""
    return _translate(value.node.expr, symbols)


def _translate(expr: sympy.Expr, symbols: Mapping[Any, sympy.Expr]) -> sympy.Expr:
    # torch writes divisions and powers as functions of its own, which sympy cannot simplify.
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
    """Put static fakes into `meta["val"]`, and dynamic shapes, where there are any, into `meta["sizes"]`."""
    several = isinstance(node.meta.get("val"), (tuple, list))
    values = list(node.meta["val"]) if several else [node.meta.get("val")]
    shapes: list[tuple[int, ...] | None] = []
    for place, value in enumerate(values):
        shape = None
        if isinstance(value, torch.Tensor):
            shape = tuple(_number(size, symbols, example) for size in value.shape)
            if any(isinstance(size, DynamicSize) for size in shape):
                # Torch's strides are expressions, too; those of the example are enough.
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


def with_symbols(exported: Exported, mode: FakeTensorMode) -> Exported:
    """Return the forward graph of a flat module with symbolic sizes of inputs, and arguments computed from them.

    This is the inverse of `with_sizes`.

    Args:
        exported: as `flat_forward` returns it, with `DynamicSize`s in `meta["sizes"]` of placeholders and among
            arguments; changed.
        mode: of its fake tensors.

    Raises:
        CaptureError: an argument cannot be computed from the sizes of inputs.
    """
    graph = exported.graph
    symbols: dict[sympy.Symbol, torch.SymInt | int] = {}
    inputs, dynamic, roots = [], {}, {}
    placeholders = exported.placeholders
    for node, item in placeholders.items():
        (shape,) = node.meta.get("sizes") or [()]
        dims = {dim: size for dim, size in enumerate(shape) if isinstance(size, DynamicSize)}
        if dims:
            env = mode.shape_env
            assert env is not None
            for size in dims.values():
                for name in size.expr.free_symbols - symbols.keys():
                    symbols[name], _ = symbolic_integer(env, size.sizes[name], len(symbols))
            sizes = [_evaluate(size.expr, symbols) if isinstance(size, DynamicSize) else size for size in shape]
            with mode:
                fake = torch.empty(sizes, dtype=item.fake.dtype, device=item.fake.device)
            item = replace(item, fake=fake.requires_grad_(item.fake.requires_grad))
            dynamic[item.name] = {dim: str(*size.expr.free_symbols) for dim, size in dims.items()}
            roots.update({(node, dim): size.expr for dim, size in dims.items()})
        inputs.append(item)
    _map_arguments(graph, _SizeNodes(graph, [*placeholders][-1], roots).of)
    exported.graph_module.recompile()
    return replace(exported, inputs=tuple(inputs), dynamic=dynamic)


def without_sizes(exported: Exported) -> Exported:
    """Return the forward graph of a flat module with the sizes of the example, changed in place."""
    _map_arguments(exported.graph, plain)
    return exported


class _SizeNodes:
    """Nodes for expressions in the sizes of inputs, each added to the graph once.

    Args:
        graph: the graph.
        last: the last placeholder, behind which nodes are added.
        roots: the expressions of dims of placeholders.
    """

    def __init__(self, graph: fx.Graph, last: fx.Node, roots: dict[tuple[fx.Node, int], sympy.Expr]) -> None:
        self._graph = graph
        self._last = last
        self._known: dict[sympy.Expr, Any] = {}
        self._symbols: dict[sympy.Symbol, Any] = {}
        # The simplest dims first: a symbol alone is read without arithmetic.
        for (node, dim), expr in sorted(roots.items(), key=lambda item: sympy.count_ops(item[1])):
            symbol, constant, factor = linear_form(expr)
            if symbol not in self._symbols:
                size = self._call(torch.ops.aten.sym_size.int, node, dim)
                product = self._call(operator.sub, size, constant) if constant else size
                self._symbols[symbol] = self._call(operator.floordiv, product, factor) if factor != 1 else product

    def of(self, number: Any) -> Any:
        """Return the node of a dynamic size or ratio; any other argument as it is."""
        if not isinstance(number, (DynamicSize, Ratio)):
            return number
        key = number.expr
        if key not in self._known:
            # A ratio of integers: floor division of graphs knows no fractions inside.
            above, below = sympy.together(key).as_numer_denom() if isinstance(number, Ratio) else (key, sympy.S.One)
            dividend = _evaluate(above, self._symbols, self._call)
            divisor = _evaluate(below, self._symbols, self._call)
            self._known[key] = dividend if below == 1 else self._call(operator.truediv, dividend, divisor)
        return self._known[key]

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not any(isinstance(argument, fx.Node) for argument in arguments):
            return function(*arguments)
        with self._graph.inserting_after(self._last):
            self._last = self._graph.call_function(function, arguments)
        return self._last


def _map_arguments(graph: fx.Graph, number: Callable[[Any], Any]) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), number)


def _evaluate(expr: sympy.Expr, symbols: dict[sympy.Symbol, Any], call: Callable[..., Any] = operator.call) -> Any:
    """Return an integer expression, computed from the values or nodes of its symbols."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return symbols[expr]
    parts = [*expr.args]
    if isinstance(expr, (sympy.floor, sympy.ceiling)):
        above, below = sympy.together(parts[0]).as_numer_denom()
        # Rounding up is the negative of rounding the negative down.
        sign = 1 if isinstance(expr, sympy.floor) else -1
        quotient = call(operator.floordiv, _evaluate(sign * above, symbols, call), _evaluate(below, symbols, call))
        return quotient if sign == 1 else call(operator.neg, quotient)
    function = operator.add if expr.is_Add else operator.mul if expr.is_Mul else None
    if isinstance(expr, sympy.Mod):
        function = operator.mod
    if expr.is_Pow and parts[1].is_Integer and parts[1] > 0:
        function, parts = operator.mul, [parts[0]] * int(parts[1])
    if function is None or not all(part.is_integer for part in parts):
        raise CaptureError(f"{expr}, on which an operator depends, can't be computed from sizes of what a stage takes.")
    return reduce(lambda left, right: call(function, left, right), (_evaluate(part, symbols, call) for part in parts))
