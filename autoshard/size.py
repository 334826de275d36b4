"""Sizes that calls may change: integers at one example, and expressions in the symbols that stand for them.

A `Size` is an `int`, so that whatever computes with sizes need not know of it: it computes with the example's number,
and the expression is computed along. What a program then holds in place of a number is the expression, which is
evaluated anew at every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import sympy

Sizes = Mapping[sympy.Symbol, int]
"""A value for every symbol."""

T = TypeVar("T")

_CACHE_SIZE = 1 << 14


def symbol(name: str) -> sympy.Symbol:
    """The symbol of a dynamic size."""
    return sympy.Symbol(name, integer=True, positive=True)


class DynamicSize(int):
    """A number of elements, steps or ranks that depends on dynamic sizes.

    It equals, and compares as, the number that it is where it was made, but two that are equal there by chance have
    different hashes: caches keep them apart. `of` makes it. (A float times a size, in this order, is a plain float:
    Python does not ask the size. Write the size first.)

    Attributes:
        expr: the number as an expression in symbols.
        sizes: where the number was taken: what the symbols stand for.
    """

    expr: sympy.Expr
    sizes: Sizes

    @staticmethod
    def of(expr: sympy.Expr, sizes: Sizes) -> int:
        """The value of an integer expression at `sizes`: a plain number where it is the same everywhere."""
        expr = sympy.sympify(expr)
        value = int(evaluate(expr, sizes))
        return value if expr.is_Integer else _size(value, expr, sizes)

    def __hash__(self) -> int:
        return hash(self.expr)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return DynamicSize.of, (self.expr, dict(self.sizes))

    def __add__(self, other: int) -> int:
        return _combine(self, other, int.__add__, lambda a, b: a + b)

    def __radd__(self, other: int) -> int:
        return _combine(self, other, int.__radd__, lambda a, b: b + a)

    def __sub__(self, other: int) -> int:
        return _combine(self, other, int.__sub__, lambda a, b: a - b)

    def __rsub__(self, other: int) -> int:
        return _combine(self, other, int.__rsub__, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, float):
            return Ratio.of(self.expr * _expr(other), self.sizes)
        return _combine(self, other, int.__mul__, lambda a, b: a * b)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> int:
        return _combine(self, other, int.__floordiv__, _floor)

    def __rfloordiv__(self, other: int) -> int:
        return _combine(self, other, int.__rfloordiv__, lambda a, b: _floor(b, a))

    def __mod__(self, other: int) -> int:
        return _combine(self, other, int.__mod__, lambda a, b: sympy.Mod(a, b))

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

    def __truediv__(self, other: Any) -> Any:
        return _ratio(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _ratio(other, self)


class Ratio(float):
    """A quotient of sizes, or a number times one: as `Size`, for what is no integer."""

    expr: sympy.Expr
    sizes: Sizes

    @staticmethod
    def of(expr: sympy.Expr, sizes: Sizes) -> float:
        """The value of an expression at `sizes`: a plain number where it is the same everywhere."""
        expr = sympy.sympify(expr)
        value = float(evaluate(expr, sizes))
        if expr.is_number:
            return value
        made = float.__new__(Ratio, value)
        made.expr, made.sizes = expr, sizes
        return made

    def __hash__(self) -> int:
        return hash(self.expr)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Ratio.of, (self.expr, dict(self.sizes))

    def __mul__(self, other: Any) -> Any:
        return Ratio.of(self.expr * _expr(other), self.sizes)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return Ratio.of(self.expr / _expr(other), self.sizes)

    def __rtruediv__(self, other: Any) -> Any:
        return Ratio.of(_expr(other) / self.expr, self.sizes)


def _size(value: int, expr: sympy.Expr, sizes: Sizes) -> DynamicSize:
    made = int.__new__(DynamicSize, value)
    made.expr, made.sizes = expr, sizes
    return made


def _expr(number: Any) -> sympy.Expr:
    if isinstance(number, (DynamicSize, Ratio)):
        return number.expr
    return sympy.Integer(int(number)) if isinstance(number, int) else sympy.Float(number)


def _combine(
    own: DynamicSize, other: int, compute: Callable[[int, int], int], derive: Callable[[Any, Any], sympy.Expr]
) -> int:
    if not isinstance(other, int):
        return NotImplemented
    value = compute(own, other)
    expr = derive(own.expr, _expr(other))
    return value if expr.is_Integer else _size(value, expr, own.sizes)


def _floor(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    quotient = sympy.cancel(a / b) if b.free_symbols else sympy.expand(a / b)
    if quotient.could_extract_minus_sign():
        return -sympy.ceiling(-quotient)
    return sympy.floor(quotient)


def _ratio(above: Any, below: Any) -> float:
    sizes = above.sizes if isinstance(above, (DynamicSize, Ratio)) else below.sizes
    return Ratio.of(_expr(above) / _expr(below), sizes)


@lru_cache(maxsize=_CACHE_SIZE)
def _substitute(expr: sympy.Expr, values: tuple[tuple[sympy.Symbol, int], ...]) -> sympy.Expr:
    return expr.xreplace({name: sympy.Integer(value) for name, value in values})


def evaluate(expr: sympy.Expr, sizes: Sizes) -> sympy.Expr:
    """The number, or truth value, that an expression has at `sizes`; never rounded."""
    return _substitute(expr, tuple(sizes.items()))


def is_dynamic(number: object) -> bool:
    """Whether a number depends on dynamic sizes."""
    return isinstance(number, (DynamicSize, Ratio))


def plain(number: T) -> T:
    """A dynamic size as the number that it is where it was made; anything else as it is."""
    if isinstance(number, DynamicSize):
        return cast(T, int(number))
    return cast(T, float(number)) if isinstance(number, Ratio) else number


def divides(divisor: int, size: int) -> bool:
    """Whether a size is a multiple of `divisor` at whatever sizes; zero is none."""
    if not isinstance(size, DynamicSize):
        return size > 0 and size % divisor == 0
    return bool(sympy.expand(size.expr / divisor).is_integer)


def ceil_div(size: int, parts: int) -> int:
    """Steps of the longest of `parts` parts of a size."""
    return -(-size // parts)


def common_divisor(a: int, b: int) -> int:
    """The greatest common divisor: of dynamic sizes, the one of their expressions, which divides them everywhere."""
    if not isinstance(a, DynamicSize) and not isinstance(b, DynamicSize):
        return math.gcd(a, b)
    sizes = a.sizes if isinstance(a, DynamicSize) else cast(DynamicSize, b).sizes
    return DynamicSize.of(sympy.gcd(_expr(a), _expr(b)), sizes)


def at(value: T, sizes: Sizes) -> T:
    """`value` with the dynamic sizes in it, in tuples, lists and dataclasses, taken at `sizes`; itself without any."""
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
