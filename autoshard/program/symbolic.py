"""Shapes of local tensors as expressions: a program's operators are run on tensors of symbolic sizes besides."""

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
        self._results: dict[tuple[Any, ...], Any] = {}  # what a call of an operator gave: equal calls are run once
        self._interned: dict[tuple[Any, ...], torch.Tensor] = {}

    def placeholder(self, node: fx.Node, shape: Sequence[int]) -> None:
        """An input of the program, of this local shape."""
        if any(map(is_dynamic, shape)):
            val = node.meta["val"]
            with self._numbers.mode:
                made = torch.empty([self._number(size) for size in shape], dtype=val.dtype, device=val.device)
            self._tensors[node] = self._intern(made)

    def run(self, node: fx.Node, op: Any, args: Any, kwargs: Any) -> None:
        """Run the operator of a node, if dynamic sizes come into it."""
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
        """The first tensor that looked like this one."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        numbers = (*tensor.shape, *tensor.stride())
        look = tuple(number.node.expr if isinstance(number, torch.SymInt) else number for number in numbers)
        return self._interned.setdefault((look, tensor.dtype), tensor)

    def _key(self, value: Any) -> Any:
        """What decides the shape that an operator gives, of one of its arguments."""
        if isinstance(value, fx.Node):
            if value in self._tensors:
                return id(self._tensors[value])  # kept as long as the key is
            val = value.meta["val"]
            return (tuple(val.shape), val.stride(), val.dtype) if isinstance(val, torch.Tensor) else val
        if isinstance(value, dict):
            return tuple((name, self._key(item)) for name, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        return value.expr if isinstance(value, (DynamicSize, Ratio)) else (type(value), value)

    def item(self, node: fx.Node, source: fx.Node, index: int) -> None:
        """A node that takes one of several results."""
        if source in self._tensors:
            self._keep(node, self._tensors[source][index])

    def has_dynamic_size(self, node: fx.Node) -> bool:
        """Whether some size of a node's tensor is dynamic."""
        return node in self._tensors

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Local shape of a node's tensor."""
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
        if isinstance(value, fx.Node):
            if value not in self._tensors:
                val = value.meta["val"]
                if not isinstance(val, torch.Tensor):
                    return val
                with self._numbers.mode:
                    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
            return self._tensors[value]
        if isinstance(value, DynamicSize):
            return self._number(value)
        return float(value) if isinstance(value, Ratio) else value

    def _number(self, size: int) -> Any:
        """Torch's symbolic integer for a size: sums and products of those for its parts."""
        return self._symbolic(size.expr) if isinstance(size, DynamicSize) else size

    def _symbolic(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        whole = all(part.is_integer for part in expr.args)
        if expr.is_Add and whole:
            return sum(self._symbolic(part) for part in expr.args)
        if expr.is_Mul and whole:
            return math.prod(self._symbolic(part) for part in expr.args)
        if expr not in self._symbolic_sizes:
            made, own = self._numbers.new(int(DynamicSize.of(expr, self.sizes)), len(self._symbolic_sizes))
            self._symbolic_sizes[expr], self._expressions[own] = made, expr
        return self._symbolic_sizes[expr]
