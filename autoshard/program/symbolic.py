"""Shapes of local tensors as expressions: a program's operators are also run on tensors of symbolic sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from autoshard.capture.symbols import expression_of
from autoshard.program._torch import SymbolicNumbers
from autoshard.size import DynamicSize, Ratio, Sizes, is_dynamic


class SymbolicShapes:
    """Keeps for every node of a program that has dynamic sizes a fake tensor with symbols for them.

    Args:
        sizes: the values of the symbols in the program's own fake tensors.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._numbers = SymbolicNumbers()
        self._symbolic_sizes: dict[sympy.Expr, Any] = {}
        self._expressions: dict[sympy.Symbol, sympy.Expr] = {}
        self._tensors: dict[fx.Node, Any] = {}
        self._results: dict[tuple[Any, ...], Any] = {}  # results of operators: equal calls are run once
        self._interned: dict[tuple[Any, ...], torch.Tensor] = {}

    def placeholder(self, node: fx.Node, shape: Sequence[int]) -> None:
        """Record an input of the program, of this local shape."""
        if any(map(is_dynamic, shape)):
            val = node.meta["val"]
            with self._numbers.mode:
                tensor = torch.empty([self._number(size) for size in shape], dtype=val.dtype, device=val.device)
            self._tensors[node] = self._intern(tensor)

    def run(self, node: fx.Node, op: Any, args: Any, kwargs: Any) -> None:
        """Run the operator of a node, if an argument depends on dynamic sizes."""
        leaves: list[Any] = []
        fx.node.map_aggregate((args, kwargs), leaves.append)
        if not any(is_dynamic(leaf) or (isinstance(leaf, fx.Node) and leaf in self._tensors) for leaf in leaves):
            return
        key = (op, *map(self._key, (args, kwargs)))
        if key not in self._results:
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._operand)
            with self._numbers.running():
                results = op(*args, **kwargs)
            single = isinstance(results, torch.Tensor)
            self._results[key] = self._intern(results) if single else tuple(map(self._intern, results))
        self._keep(node, self._results[key])

    def _intern(self, tensor: Any) -> Any:
        """Return the first tensor with this shape, these strides and this dtype."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        numbers = (*tensor.shape, *tensor.stride())
        layout = tuple(number.node.expr if isinstance(number, torch.SymInt) else number for number in numbers)
        return self._interned.setdefault((layout, tensor.dtype), tensor)

    def _key(self, value: Any) -> Any:
        """Return what of an argument decides the shape of an operator's results."""
        if isinstance(value, fx.Node):
            if value in self._tensors:
                # Tensors are interned, so equal ones have one id, and they live as long as the key.
                return id(self._tensors[value])
            val = value.meta["val"]
            return (tuple(val.shape), val.stride(), val.dtype) if isinstance(val, torch.Tensor) else val
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        return value.expr if isinstance(value, (DynamicSize, Ratio)) else (type(value), value)

    def item(self, node: fx.Node, source: fx.Node, index: int) -> None:
        """Record a node that takes one of several results."""
        if source in self._tensors:
            self._keep(node, self._tensors[source][index])

    def has_dynamic_size(self, node: fx.Node) -> bool:
        """Return True if a size of a node's tensor is dynamic."""
        return node in self._tensors

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Return the local shape of a node's tensor."""
        if node not in self._tensors:
            return tuple(node.meta["val"].shape)
        return tuple(
            DynamicSize.of(expression_of(size, self._expressions), self.sizes)
            if isinstance(size, torch.SymInt)
            else size
            for size in self._tensors[node].shape
        )

    def _keep(self, node: fx.Node, value: Any) -> None:
        results = value if isinstance(value, (tuple, list)) else [value]
        sizes = [size for result in results if isinstance(result, torch.Tensor) for size in result.shape]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            self._tensors[node] = value

    def _operand(self, value: Any) -> Any:
        if isinstance(value, DynamicSize):
            return self._number(value)
        if isinstance(value, Ratio):
            return float(value)
        if not isinstance(value, fx.Node):
            return value
        if value in self._tensors:
            return self._tensors[value]
        val = value.meta["val"]
        if not isinstance(val, torch.Tensor):
            return val
        with self._numbers.mode:
            return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)

    def _number(self, size: int) -> Any:
        """Return torch's symbolic integer for a dynamic size."""
        return self._symbolic(size.expr) if isinstance(size, DynamicSize) else size

    def _symbolic(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        # Sums and products are made of their parts, so that torch sees that sizes are equal, or one a multiple.
        if all(part.is_integer for part in expr.args):
            if expr.is_Add:
                return sum(self._symbolic(part) for part in expr.args)
            if expr.is_Mul:
                return math.prod(self._symbolic(part) for part in expr.args)
        # Everything else, such as a rounded quotient, is a symbol for torch.
        if expr not in self._symbolic_sizes:
            value = int(DynamicSize.of(expr, self.sizes))
            self._symbolic_sizes[expr], symbol = self._numbers.new(value, len(self._symbolic_sizes))
            self._expressions[symbol] = expr
        return self._symbolic_sizes[expr]
