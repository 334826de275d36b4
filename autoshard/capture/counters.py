"""Stand-ins for numbers and containers that `forward` counts with or fills: they refuse to be read."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
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

    def apply_to(self, number: Number) -> Any:
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


FillableContainer = list[Any] | deque[Any] | dict[Any, Any]


class ContainerStandIn:
    """A container in place of one that `forward` fills.

    It holds one thing that nobody can use, for code in C that reads it unseen.

    Attributes:
        path: of the attribute or variable.
        cleared: whether it was.
        read: filled with the path where anything depended on its contents.
    """

    path: str
    cleared: bool
    read: list[str]


def _refuse_contents(container: Any, *_: Any, **__: Any) -> NoReturn:
    container.read.append(container.path)
    raise CounterError(container.path)


_ALLOWED_METHODS = frozenset(
    {
        *("__class__", "__new__", "__init__", "__getattribute__", "__setattr__", "__init_subclass__", "__doc__"),
        *("__subclasshook__", "__class_getitem__", "__dir__", "__delattr__", "__sizeof__", "__hash__"),
    }
)


def _stand_in_class(kind: type, writes: Iterable[str]) -> type:
    def clear(container: Any) -> None:
        container.cleared = True
        vars(kind)["clear"](container)

    refused = {name: _refuse_contents for name in dir(kind) if name not in {*_ALLOWED_METHODS, *writes}}
    return type(f"Blind{kind.__name__}", (ContainerStandIn, kind), {**refused, "clear": clear})


_STAND_INS = {
    list: _stand_in_class(list, ("append", "extend")),
    deque: _stand_in_class(deque, ("append", "extend")),
    dict: _stand_in_class(dict, ("__setitem__", "update")),
}
FILLABLE = (list, deque, dict)
"""Kinds of containers that a stand-in is for."""


def container_stand_in(container: FillableContainer, path: str, read: list[str]) -> FillableContainer:
    """A stand-in for a container of one of the kinds of `FILLABLE`."""
    kind = _STAND_INS[type(container)]
    nobody = object()
    made: Any = kind({nobody: nobody}) if isinstance(container, dict) else kind([nobody])
    made.path, made.cleared, made.read = path, False, read
    return made


def added_entries(container: Any) -> tuple[dict[Any, Any], bool]:
    """What was put into a stand-in, by key or position, and whether that is all there is then."""
    kind = next(kind for kind in FILLABLE if isinstance(container, kind))
    first = 0 if container.cleared else 1
    if isinstance(container, dict):
        pairs = list(zip(dict.keys(container), dict.values(container), strict=True))[first:]
    else:
        pairs = list(enumerate(list(kind.__iter__(container))[first:]))
    return dict(pairs), container.cleared
