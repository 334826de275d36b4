"""Dynamic sizes, which calls may change: the integer of an example, and an expression in symbols.

A `DynamicSize` is an `int`, so that code that computes with sizes need not know of it: arithmetic returns the number
in the example together with the expression. A program holds the expression and evaluates it at every call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import sympy

Sizes = Mapping[sympy.Symbol, int]
"""A value for every symbol."""

T = TypeVar("T")


def symbol(name: str) -> sympy.Symbol:
    """Return the symbol of a dynamic size."""
    return sympy.Symbol(name, integer=True, positive=True)


class _SymbolicNumber:
    """A number with the expression that it is in symbols.

    Attributes:
        expr: the expression.
        sizes: the values of the symbols in the example.
    """

    expr: sympy.Expr
    sizes: Sizes

    # By expression, not by number: caches must distinguish sizes that are equal in the example by chance.
    def __hash__(self) -> int:
        return hash(self.expr)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self).of, (self.expr, dict(self.sizes))  # type: ignore[attr-defined]

    def __truediv__(self, other: Any) -> Any:
        return Ratio.of(self.expr / _expr(other), self.sizes)

    def __rtruediv__(self, other: Any) -> Any:
        return Ratio.of(_expr(other) / self.expr, self.sizes)


class DynamicSize(_SymbolicNumber, int):
    """A number of elements, steps or ranks that depends on dynamic sizes; `of` makes it.

    It compares as its number in the example. (A float times a size, in this order, is a plain float: Python does not
    call the size's method. Write the size first.)
    """

    @staticmethod
    def of(expr: sympy.Expr, sizes: Sizes) -> int:
        """Return the value of an integer expression at `sizes`; a plain number if the expression is constant."""
        expr = sympy.sympify(expr)
        value = int(evaluate(expr, sizes))
        return value if expr.is_Integer else _size(value, expr, sizes)

    # Every operation of shape computations is overridden: that of `int` would return the number of the example only.
    def __add__(self, other: int) -> int:
        return _combine(self, other, int.__add__, operator.add)

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return _combine(self, other, int.__sub__, operator.sub)

    def __rsub__(self, other: int) -> int:
        return _combine(self, other, int.__rsub__, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        # The product with a float is no integer.
        if isinstance(other, float):
            return Ratio.of(self.expr * _expr(other), self.sizes)
        return _combine(self, other, int.__mul__, operator.mul)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        return _combine(self, other, int.__floordiv__, _floor)

    def __rfloordiv__(self, other: int) -> int:
        return _combine(self, other, int.__rfloordiv__, lambda a, b: _floor(b, a))

    def __mod__(self, other: int) -> int:
        return _combine(self, other, int.__mod__, sympy.Mod)

    def __rmod__(self, other: int) -> int:
        return _combine(self, other, int.__rmod__, lambda a, b: sympy.Mod(b, a))

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self

    def __neg__(self) -> int:
        return _size(-int(self), -self.expr, self.sizes)

    def __pos__(self) -> int:
        return self


class Ratio(_SymbolicNumber, float):
    """A quotient of sizes, or a number times one: a `DynamicSize` that is not an integer."""

    @staticmethod
    def of(expr: sympy.Expr, sizes: Sizes) -> float:
        """Return the value of an expression at `sizes`; a plain number if the expression is constant."""
        expr = sympy.sympify(expr)
        value = float(evaluate(expr, sizes))
        if expr.is_number:
            return value
        ratio = float.__new__(Ratio, value)
        ratio.expr, ratio.sizes = expr, sizes
        return ratio

    def __mul__(self, other: Any) -> Any:
        return Ratio.of(self.expr * _expr(other), self.sizes)

    __rmul__ = __mul__


def _size(value: int, expr: sympy.Expr, sizes: Sizes) -> DynamicSize:
    size = int.__new__(DynamicSize, value)
    size.expr, size.sizes = expr, sizes
    return size


def _expr(number: Any) -> sympy.Expr:
    if isinstance(number, _SymbolicNumber):
        return number.expr
    return sympy.Integer(int(number)) if isinstance(number, int) else sympy.Float(number)


def _combine(
    size: DynamicSize, other: int, compute: Callable[[int, int], int], derive: Callable[[Any, Any], sympy.Expr]
) -> int:
    if not isinstance(other, int):
        return NotImplemented
    value = compute(size, other)
    expr = derive(size.expr, _expr(other))
    return value if expr.is_Integer else _size(value, expr, size.sizes)


def _floor(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    # A sum of terms in lowest terms: sympy moves the integer terms out of the floor.
    quotient = sympy.cancel(a / b) if b.free_symbols else sympy.expand(a / b)
    # Turns -(-a // b), the ceiling in Python, into sympy's ceiling, so that the two expressions are equal.
    if quotient.could_extract_minus_sign():
        return -sympy.ceiling(-quotient)
    return sympy.floor(quotient)


@lru_cache(maxsize=1 << 14)
def _substitute(expr: sympy.Expr, values: tuple[tuple[sympy.Symbol, int], ...]) -> sympy.Expr:
    return expr.xreplace({name: sympy.Integer(value) for name, value in values})


def evaluate(expr: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    """Return the number, or truth value, of an expression at `sizes`; never rounded."""
    return _substitute(expr, tuple(sizes.items()))


def is_dynamic(number: object) -> bool:
    """Return True if a number depends on dynamic sizes."""
    return isinstance(number, _SymbolicNumber)


def plain(number: T) -> T:
    """Return the number of a dynamic size in the example; anything else unchanged."""
    if isinstance(number, DynamicSize):
        return cast(T, int(number))
    return cast(T, float(number)) if isinstance(number, Ratio) else number


def divides(divisor: int, size: int) -> bool:
    """Return True if a size is a multiple of `divisor` for all values of the symbols; False for zero."""
    if not isinstance(size, DynamicSize):
        return size > 0 and size % divisor == 0
    return bool(sympy.expand(size.expr / divisor).is_integer)


def ceil_div(size: int, parts: int) -> int:
    """Return the length of the longest of `parts` parts of a size."""
    return -(-size // parts)


def common_divisor(a: int, b: int) -> int:
    """Return the greatest common divisor; for dynamic sizes that of their expressions, which divides all values."""
    if not isinstance(a, DynamicSize) and not isinstance(b, DynamicSize):
        return math.gcd(a, b)
    sizes = a.sizes if isinstance(a, DynamicSize) else cast(DynamicSize, b).sizes
    return DynamicSize.of(sympy.gcd(_expr(a), _expr(b)), sizes)


def at(value: T, sizes: Sizes) -> T:
    """Return `value` with the dynamic sizes in tuples, lists and dataclasses taken at `sizes`; itself without any."""
    if not sizes:
        return value
    if isinstance(value, (DynamicSize, Ratio)):
        return cast(T, type(value).of(value.expr, sizes))
    if isinstance(value, (tuple, list)):
        items = [at(item, sizes) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return cast(T, type(value)(items)) if changed else value
    if is_dataclass(value) and not isinstance(value, type):
        new = {field.name: at(getattr(value, field.name), sizes) for field in fields(value)}
        changed = any(new[name] is not getattr(value, name) for name in new)
        return cast(T, replace(value, **new)) if changed else value
    return value
