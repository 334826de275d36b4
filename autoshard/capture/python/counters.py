"""Stand-ins for numbers that `forward` only counts with, and for containers that it only fills.

They are no condition of a graph: a stand-in that is read raises an error or records it.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

Number = int | float
# An operation, its other operand, and a flag: True if that operand comes first.
Step = tuple[Callable[[Any, Any], Any], Number, bool]

_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
# Special methods that read a number; their results are no counters.
READS = (
    *("bool", "int", "float", "complex", "index", "str", "repr", "format", "hash", "round", "trunc", "floor", "ceil"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "divmod", "rdivmod"),
    *("and", "or", "xor", "lshift", "rshift", "rand", "ror", "rxor", "rlshift", "rrshift", "matmul", "rmatmul"),
)


class CounterError(Exception):
    """The graph, or a branch in `forward`, depends on a counter."""


@dataclass(slots=True, eq=False)
class Counter:
    """Stand-in for the number that an attribute has when `forward` begins.

    Attributes:
        path: of the attribute.
        read: gets the path if anything depends on the number.
        current: returns the current number of the user's attribute.
        steps: the arithmetic on the number since.
    """

    path: str
    read: list[str]
    current: Callable[[], Number]
    steps: tuple[Step, ...] = ()

    def result(self) -> Any:
        """Return the current number of the attribute after these steps."""
        number = self.current()
        for operation, operand, comes_first in self.steps:
            number = operation(operand, number) if comes_first else operation(number, operand)
        return number

    # Attributes that numbers have, such as `real` or `is_integer`.
    def __getattr__(self, name: str) -> NoReturn:
        _refuse(self)


def _refuse(counter: Any, *_: Any, **__: Any) -> NoReturn:
    # Also record the path, since code may catch the error.
    counter.read.append(counter.path)
    raise CounterError(counter.path)


def _arithmetic(operation: Callable[[Any, Any], Any], comes_first: bool) -> Callable[[Counter, Any], Counter]:
    def apply(counter: Counter, operand: Any) -> Counter:
        # With another operand, such as a tensor, the graph would depend on the number.
        if type(operand) not in (int, float, bool):
            _refuse(counter)
        steps = (*counter.steps, (operation, operand, comes_first))
        return Counter(counter.path, counter.read, counter.current, steps)

    return apply


for _name, _operation in _ARITHMETIC.items():
    setattr(Counter, f"__{_name}__", _arithmetic(_operation, False))
    setattr(Counter, f"__r{_name}__", _arithmetic(_operation, True))
for _name in READS:
    setattr(Counter, f"__{_name}__", _refuse)


FillableContainer = list[Any] | deque[Any] | dict[Any, Any]


class ContainerStandIn:
    """Stand-in for a container that `forward` fills.

    Attributes:
        path: of the attribute or variable.
        cleared: True if the code called `clear`.
        read: gets the path if anything depends on the contents.
    """

    path: str
    cleared: bool
    read: list[str]


# Methods that do not depend on the contents. All others but writes read them.
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

    refused = {name: _refuse for name in dir(kind) if name not in {*_ALLOWED_METHODS, *writes}}
    return type(f"Blind{kind.__name__}", (ContainerStandIn, kind), {**refused, "clear": clear})


_STAND_INS = {
    list: _stand_in_class(list, ("append", "extend")),
    deque: _stand_in_class(deque, ("append", "extend")),
    dict: _stand_in_class(dict, ("__setitem__", "update")),
}
FILLABLE = (list, deque, dict)
"""Types of containers that have a stand-in."""


def container_stand_in(container: FillableContainer, path: str, read: list[str]) -> FillableContainer:
    """Return a stand-in for a container of one of the types of `FILLABLE`."""
    kind = _STAND_INS[type(container)]
    # C code reads containers without their methods: a useless element makes it fail, unlike an empty container.
    useless = object()
    stand_in: Any = kind({useless: useless}) if isinstance(container, dict) else kind([useless])
    stand_in.path, stand_in.cleared, stand_in.read = path, False, read
    return stand_in


def added_entries(container: Any) -> tuple[dict[Any, Any], bool]:
    """Return the entries that were added to a stand-in, by key or position, and True if it was cleared before."""
    # Methods of the type itself, since those of the stand-in raise errors.
    kind = next(kind for kind in FILLABLE if isinstance(container, kind))
    first = 0 if container.cleared else 1
    if isinstance(container, dict):
        pairs = list(zip(dict.keys(container), dict.values(container), strict=True))[first:]
    else:
        pairs = list(enumerate(list(kind.__iter__(container))[first:]))
    return dict(pairs), container.cleared
