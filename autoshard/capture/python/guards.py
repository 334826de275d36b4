"""Guards: the Python state that a capture read, compared with the current state at every call."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

ABSENT = object()
"""Marks a value that does not exist, or cannot be compared."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with the hooks that its call runs."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum, slice, range)
_IDENTICAL = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset)
CONTAINERS = (dict, *_SEQUENCES, *_SETS)

_LONGEST = 100  # characters of a value that an error shows
# Most entries of a container that is compared at every call: settings are smaller, vocabularies larger.
_LARGEST = 256


def is_plain(value: object) -> bool:
    """Return True for numbers, strings and the like, which are interchangeable when equal."""
    return isinstance(value, _PLAIN)


def copy_value(value: object) -> Any:
    """Copy a plain value or nested containers of plain values; return ABSENT if it cannot be compared."""
    if is_plain(value) or isinstance(value, _IDENTICAL):
        return value
    if isinstance(value, CONTAINERS) and len(value) > _LARGEST:
        return ABSENT
    if isinstance(value, dict):
        items = {key: copy_value(item) for key, item in value.items()}
        return ABSENT if any(item is ABSENT for item in items.values()) else items
    for kind in (*_SEQUENCES, *_SETS):
        if isinstance(value, kind):
            parts = [copy_value(item) for item in value]
            return ABSENT if any(item is ABSENT for item in parts) else kind(parts)
    return ABSENT


def _is_all_plain(value: object) -> bool:
    """Return True for plain values, and nested containers of plain values."""
    if isinstance(value, CONTAINERS):
        items = (*value, *value.values()) if isinstance(value, dict) else value
        return len(value) <= _LARGEST and all(map(_is_all_plain, items))
    return is_plain(value)


def is_equivalent(now: Any, copy: Any) -> bool:
    """Return True if a value is interchangeable with a copy: numbers of one type, in containers of one kind."""
    if now is copy:
        return True
    if isinstance(copy, dict):
        same_keys = isinstance(now, dict) and list(now) == list(copy)  # in order, as code may iterate over them
        return same_keys and all(map(is_equivalent, now.values(), copy.values()))
    if isinstance(copy, _SEQUENCES):
        same_size = isinstance(now, _SEQUENCES) and len(now) == len(copy)
        return same_size and isinstance(now, list) == isinstance(copy, list) and all(map(is_equivalent, now, copy))
    if isinstance(copy, _SETS):
        return isinstance(now, _SETS) and now == copy
    if not is_plain(copy) or type(now) is not type(copy):
        return False
    if isinstance(copy, (float, complex)):
        return repr(now) == repr(copy)  # 0.0 is not -0.0, and nan is nan
    return bool(now == copy)


class Guard(Protocol):
    """Python state that a graph depends on."""

    @property
    def path(self) -> str:
        """The user's expression for it."""

    def holds(self) -> bool:
        """Return True if the state is unchanged."""


@dataclass(slots=True, eq=False)
class ValueGuard:
    """A value that a capture read.

    Attributes:
        path: the user's expression for it, such as `self.layers.0.dropout.p`.
        table: the attributes of a module, an object or a class.
        name: its key in `table`.
        value: the value at the capture.
        copy: a copy of a container; ABSENT if the value is no container, or cannot be compared.
        size: the number of entries of a container.
    """

    path: str
    table: Mapping[str, Any]
    name: str
    value: Any = field(init=False)
    copy: Any = field(init=False)
    size: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.table[self.name]
        contains = isinstance(self.value, CONTAINERS)
        self.copy = copy_value(self.value) if contains else ABSENT
        self.size = len(self.value) if contains else None

    def holds(self) -> bool:
        """Return True if the value is interchangeable with that of the capture."""
        now = self.table.get(self.name, ABSENT)
        if isinstance(self.value, Tensor):  # its data is an input of the graph
            return isinstance(now, Tensor) and now.shape == self.value.shape and now.dtype == self.value.dtype
        if self.copy is not ABSENT:
            return is_equivalent(now, self.copy)
        if self.size is not None:  # the contents cannot be compared, but the size can
            return type(now) is type(self.value) and len(now) == self.size
        return is_equivalent(now, self.value)

    def describe_value(self) -> str:
        """Return the current value in words."""
        now = self.table.get(self.name, ABSENT)
        if now is ABSENT:
            return "nothing"
        # The `repr` of an object may be long, or contain its address, which differs between ranks.
        text = repr(now) if _is_all_plain(now) else getattr(now, "__qualname__", f"a {type(now).__name__}")
        return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


@dataclass(slots=True, eq=False)
class TableGuard:
    """A table whose set of entries a capture read: submodules, attributes or hooks of a module.

    Attributes:
        path: the path of the module or object.
        kind: the kind of entries, in words.
        table: the table.
        names: the keys that were read; None for all.
        keys_only: True if the values are guarded elsewhere.
        copy: a copy of the entries that were read.
    """

    path: str
    kind: str
    table: Mapping[Any, Any]
    names: Collection[str] | None = None
    keys_only: bool = False
    copy: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        names = self.table if self.names is None else [name for name in self.names if name in self.table]
        self.copy = {name: None if self.keys_only else self.table[name] for name in names}

    def holds(self) -> bool:
        """Return True if the table has the same objects."""
        if self.keys_only:
            return self.table.keys() == self.copy.keys()
        # In order, since hooks and submodules run in order.
        if self.names is None:
            now, then = list(self.table.values()), list(self.copy.values())
            return len(now) == len(then) and all(map(is_, now, then))
        return all(self.table.get(name, ABSENT) is self.copy.get(name, ABSENT) for name in self.names)


@dataclass(slots=True, eq=False)
class Guards:
    """All guards of one capture.

    `hold` runs at every call, so it has a fast path: values are compared by identity, tables of submodules and
    containers in one comparison, and hooks by the number of hooks that the process has made. Only if one of these
    differs, the exact comparison of every guard decides.

    Attributes:
        reads: values.
        submodules: tables of submodules.
        attributes: tables of attributes, with the names that were found in the class instead of the table; or, with
            `keys_only`, tables of the attributes of objects.
        hooks: tables of hooks.
        mutations: changes of objects by the call, on whose old values it may depend.
    """

    reads: Sequence[ValueGuard] = ()
    submodules: Sequence[TableGuard] = ()
    attributes: Sequence[TableGuard] = ()
    hooks: Sequence[TableGuard] = ()
    mutations: Sequence[Guard] = ()
    _names: dict[str, Any] = field(init=False, default_factory=dict)
    _are_identical: Callable[[], bool] = field(init=False)
    _slow: list[Guard] = field(init=False)
    _counted: list[Mapping[str, Any]] = field(init=False)
    _counts: list[int] = field(init=False)
    _live: list[Any] = field(init=False)
    _copies: list[Any] = field(init=False)
    _without_hooks: tuple[Mapping[Any, Any], ...] = field(init=False)
    _hooks_made: int = field(init=False)

    def __post_init__(self) -> None:
        exec(self._compile_comparison(), self._names)
        self._are_identical = self._names["are_identical"]
        self._prepare()

    def _compile_comparison(self) -> str:
        """Return the source of a function that compares all values by identity, and checks for absent names."""
        # One expression, with tables `t0` and values `v0` as globals of the function: a loop takes twice the time.
        tables: dict[int, str] = {}
        checks = []
        for number, read in enumerate(self.reads):
            if not isinstance(read.value, Tensor):
                table = tables.setdefault(id(read.table), f"t{len(tables)}")
                self._names[table] = read.table
                checks.append(f"{table}[{read.name!r}] is v{number}")
        for absent in self.attributes:
            table = tables.setdefault(id(absent.table), f"t{len(tables)}")
            self._names[table] = absent.table
            checks += [f"{name!r} not in {table}" for name in absent.names or ()]
        return f"def are_identical():\n    return {' and '.join(checks) or 'True'}\n"

    def _prepare(self) -> None:
        """Store the current state in the form that is compared fastest."""
        # Attributes of an object are hardly ever replaced by attributes with other names: the fast path counts them.
        self._counted = [attributes.table for attributes in self.attributes if attributes.keys_only]
        self._counts = list(map(len, self._counted))
        self._names |= {f"v{number}": read.table.get(read.name) for number, read in enumerate(self.reads)}
        self._slow = [*self.mutations]
        self._slow += [
            read
            for read in self.reads
            if isinstance(read.value, Tensor) or (read.size is not None and read.copy is ABSENT)
        ]
        # Comparing two lists runs in C, and compares entries by identity first.
        contents = [(read.table[read.name], read.copy) for read in self.reads if read.copy is not ABSENT]
        tables = [guard.table for guard in (*self.hooks, *self.submodules) if guard.table]
        compared = [*contents, *((table, dict(table)) for table in tables)]
        self._live, self._copies = [live for live, _ in compared], [copy for _, copy in compared]
        self._without_hooks = tuple(hooks.table for hooks in self.hooks if not hooks.table)
        self._hooks_made = RemovableHandle.next_id

    def hold(self) -> bool:
        """Return True if a call with the current Python state would be captured as the same graph."""
        with contextlib.suppress(KeyError):  # an attribute was deleted
            counts = list(map(len, self._counted)) == self._counts
            if counts and self._are_identical() and self._live == self._copies and self._has_no_new_hooks():
                return all(read.holds() for read in self._slow)
        if next(self.changes(), None) is not None:
            return False
        self._prepare()  # other, interchangeable objects: the next call takes the fast path again
        return True

    def _has_no_new_hooks(self) -> bool:
        # torch counts the hooks of the whole process: without new ones, no table has any.
        if RemovableHandle.next_id != self._hooks_made:
            if any(self._without_hooks):
                return False
            self._hooks_made = RemovableHandle.next_id
        return True

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield the subjects that changed, and their current values in words."""
        for read in self.reads:
            if not read.holds():
                yield f"the attribute {read.path}", read.describe_value()
        for mutation in self.mutations:
            if not mutation.holds():
                yield f"the attribute {mutation.path}", "other contents"
        for table in (*self.submodules, *self.attributes, *self.hooks):
            if not table.holds():
                names = [getattr(entry, "__name__", type(entry).__name__) for entry in table.table.values()]
                shown = [name for name in table.names or () if name in table.table and name not in table.copy]
                yield f"the {table.kind} of {table.path}", ", ".join(shown or names) or "none"

    @contextlib.contextmanager
    def captured_values(self) -> Iterator[None]:
        """Context in which attributes have the values that they had at the capture."""
        # Tables of classes are read-only mappings, which are not changed.
        changed = [
            (read, read.table, read.table.get(read.name, ABSENT))
            for read in self.reads
            if isinstance(read.table, dict) and not read.holds()
        ]
        for read, table, _ in changed:
            table[read.name] = read.value if read.copy is ABSENT else copy_value(read.copy)
        try:
            yield
        finally:
            for read, table, now in changed:
                if now is ABSENT:
                    del table[read.name]
                else:
                    table[read.name] = now
