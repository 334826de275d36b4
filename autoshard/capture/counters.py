"""Stand-ins for numbers that `forward` counts with: they note what is done to them, and refuse to be read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

Number = int | float
Step = tuple[Callable[[Any, Any], Any], Number, bool]  # an operation, its other operand, and whether that comes first

_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
READS = (
    *("bool", "int", "float", "complex", "index", "str", "repr", "format", "hash", "round", "trunc", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "divmod", "rdivmod"),
    *("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift", "matmul", "rmatmul"),
)


class CounterError(Exception):
    """The graph, or the way through `forward`, depends on a number that `forward` counts with."""


@dataclass(slots=True, eq=False)
class Counter:
    """In place of a number that an attribute has when `forward` begins.

    Attributes:
        path: of the attribute.
        steps: what was done to it since.
        read: filled with the path where anything depended on it.
    """

    path: str
    steps: tuple[Step, ...]
    read: list[str]

    def after(self, number: Number) -> Any:
        """What becomes of a number."""
        for operation, other, comes_first in self.steps:
            number = operation(other, number) if comes_first else operation(number, other)
        return number

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(counter: Counter, *_: Any, **__: Any) -> NoReturn:
    counter.read.append(counter.path)
    raise CounterError(counter.path)


def _arithmetic(operation: Callable[[Any, Any], Any], comes_first: bool) -> Callable[[Counter, Any], Counter]:
    def apply(counter: Counter, other: Any) -> Counter:
        if type(other) not in (int, float, bool):
            _refuse(counter)
        return Counter(counter.path, (*counter.steps, (operation, other, comes_first)), counter.read)

    return apply


for _name, _operation in _ARITHMETIC.items():
    setattr(Counter, f"__{_name}__", _arithmetic(_operation, False))
    setattr(Counter, f"__r{_name}__", _arithmetic(_operation, True))
for _name in READS:
    setattr(Counter, f"__{_name}__", _refuse)
