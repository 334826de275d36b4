"""The Python objects that `forward` can reach: containers, objects with attributes, variables of functions.

They are bound to their copies, so that changes by the copy's `forward` are detected and undone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from autoshard.capture.capture_errors import is_users_file
from autoshard.capture.python.guards import ABSENT, HOOKS, is_equivalent, is_plain

FOREIGN = frozenset({"torch", "autoshard", "builtins", "numpy", "logging", "threading", "weakref", "typing", "tqdm"})
"""Packages whose objects are not state of a model (torch itself shows a tqdm bar while it traces)."""

MODULE_STATE = frozenset({"__dict__", "__class__", *vars(nn.Module())})
"""Attributes that every module has."""

_PARAMETER_LISTS = frozenset({"_flat_weights", "_flat_weight_refs"})


def is_parameter_list(owner: object, name: str) -> bool:
    """Return True if an attribute is torch's list of the parameters of a recurrent layer.

    The layer rebuilds it when its parameters differ from those in it, as in every capture.
    """
    return name in _PARAMETER_LISTS and isinstance(owner, nn.RNNBase)


NumPyGenerator = np.random.Generator | np.random.RandomState

# Depth to which nested objects are followed: models nest configurations two or three deep.
DEPTH = 4
_MOST = 20_000  # inspected objects and functions


def is_autoshard(value: object) -> bool:
    """Return True if a value's class or module is autoshard's."""
    owner = getattr(value, "__module__", None) or type(value).__module__
    return isinstance(owner, str) and owner.split(".")[0] == "autoshard"


def is_object(value: object) -> bool:
    """Return True if a value is an object of the user's code that has attributes.

    A thread does not count: it changes itself during a call, such as the monitor of tqdm, but the call does not.
    """
    if isinstance(value, threading.Thread) or type(value).__module__.split(".")[0] in FOREIGN:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


@dataclass(slots=True, eq=False)
class TrackedObject:
    """A mutable object, or a namespace of variables, attributes or defaults of arguments.

    Attributes:
        path: the user's expression.
        original: the user's object; for a namespace, its table; for defaults of arguments, the function.
        owner: the object whose attributes a namespace has.
        root: the namespace that contains the object, and its name there; None for a namespace.
        names: the tracked names of a namespace, if not all are.
        is_inside: True for the objects of the module, False for those of its code.
        traced: the twin's copy of `original`; `original` itself outside of the module.
        before: the entries of `traced` before `forward`, by key or position.
    """

    path: str
    original: Any
    owner: Any = None
    root: tuple[TrackedObject, str] | None = None
    names: dict[str, None] | None = None
    is_inside: bool = False
    traced: Any = field(init=False)
    before: dict[Any, Any] = field(init=False)

    def bind(self, copies: Mapping[int, Any]) -> None:
        """Set the traced object, given the twin's copies of objects by the `id` of the originals."""
        # The memo of `copy.deepcopy` does not contain the new table of attributes: take it from the owner's copy.
        if self.owner is not None:
            self.traced = vars(copies.get(id(self.owner), self.owner))
        else:
            self.traced = copies.get(id(self.original), self.original)
        if isinstance(self.traced, dict) is not isinstance(self.original, dict):
            self.traced = self.original  # the module has a custom `__deepcopy__`
        self.before = self.entries(self.traced)

    @property
    def is_ordered(self) -> bool:
        """True if the object holds values without keys."""
        return isinstance(self.original, (list, deque, set))

    @property
    def is_namespace(self) -> bool:
        """True if the object holds attributes or variables."""
        return self.root is None

    @property
    def is_module(self) -> bool:
        """True if the object holds the attributes of the module or of a submodule."""
        return self.is_inside and isinstance(self.owner, nn.Module)

    def traced_value(self, name: str) -> Any:
        """Return the value of the traced namespace under a name."""
        return self.entries(self.traced).get(name)

    def entries(self, held: Any) -> dict[Any, Any]:
        """Return the entries of the original or the traced object, ignoring custom iteration of its class."""
        if self.is_ordered:
            return dict(enumerate(elements(held)))
        if isinstance(held, types.CellType):
            return {} if _is_empty(held) else {"": held.cell_contents}
        if isinstance(held, types.FunctionType):
            return {name: value for name, value in _defaults(held).items() if not is_plain(value)}
        if isinstance(held, type):
            return {name: value for name, value in vars(held).items() if _is_state(name, value)}
        if self.names is not None:
            return {name: held[name] for name in self.names if name in held}
        return dict(zip(dict.keys(held), dict.values(held), strict=True))

    def write(self, target: Any, entries: Mapping[Any, Any], removed: Iterable[Any] = ()) -> None:
        """Write entries to the original or the traced object; they replace all values of an ordered object."""
        if isinstance(target, (list, deque)):
            target.clear()
            target.extend(entries.values())
        elif isinstance(target, set):
            target.clear()
            target.update(entries.values())
        elif isinstance(target, types.CellType):
            target.cell_contents = entries[""]
        elif isinstance(target, types.FunctionType):
            defaults = {**_defaults(target), **entries}
            target.__defaults__ = tuple(defaults[name] for name in _positional(target)) or None
            target.__kwdefaults__ = {name: defaults[name] for name in target.__kwdefaults__ or {}} or None
        elif isinstance(target, type):
            for name, value in entries.items():
                setattr(target, name, value)
            for name in removed:
                delattr(target, name)
        else:
            # Bypass methods of a subclass, which may do more, or fail.
            for key, value in entries.items():
                dict.__setitem__(target, key, value)
            for key in removed:
                dict.pop(target, key, None)

    def is_changed(self) -> bool:
        """Return True if the entries of the traced object have changed."""
        if self.is_ordered:
            return [*map(id, self.entries(self.traced).values())] != [*map(id, self.before.values())]
        return any(self.changes())

    def changes(self) -> tuple[dict[Any, Any], list[Any]]:
        """Return the new entries of the traced object (all entries if it is ordered), and the removed keys."""
        now, before = self.entries(self.traced), self.before
        if self.is_ordered:
            return now, []
        changed = {key: value for key, value in now.items() if not _is_same(before.get(key, ABSENT), value)}
        return changed, [key for key in before if key not in now]

    def restore(self) -> None:
        """Undo the changes of the traced object."""
        changed, removed = self.changes()
        if self.is_ordered:
            if self.is_changed():
                self.write(self.traced, self.before)
        elif changed or removed:
            old = {key: self.before[key] for key in (*changed, *removed) if key in self.before}
            self.write(self.traced, old, [key for key in changed if key not in self.before])


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (is_plain(before) and is_equivalent(now, before))


def elements(value: Any) -> Iterator[Any]:
    """Return the elements of a list, tuple, deque or set, ignoring custom iteration of its class."""
    kind = next(kind for kind in (list, tuple, deque, set, frozenset) if isinstance(value, kind))
    return iter(kind.__iter__(value))


def _is_state(name: str, value: object) -> bool:
    """Return True if an attribute of a class is state, not code."""
    code = (types.FunctionType, property, staticmethod, classmethod, types.MemberDescriptorType)
    return not name.startswith(("__", "_abc_")) and not isinstance(value, code)


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is ABSENT
    except ValueError:
        return True


def _positional(function: types.FunctionType) -> tuple[str, ...]:
    """Return the names of the positional arguments that have defaults."""
    code = function.__code__
    return code.co_varnames[code.co_argcount - len(function.__defaults__ or ()) : code.co_argcount]


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's arguments by name."""
    positional = dict(zip(_positional(function), function.__defaults__ or (), strict=True))
    return positional | (function.__kwdefaults__ or {})


class Reachable:
    """The mutable objects that the code of a user's module can reach, and those that hooks can reach.

    Args:
        module: the module.
        hooks: hooks; by default those of the submodules.
        alone: True for only the objects of the hooks, without the code and the submodules of the module.

    Attributes:
        places: the objects of the module; then variables of functions, attributes of classes, and the objects in them.
        forward_places: the number of places that are not of hooks.
        codes: the code objects of the user.
        generators: NumPy's generators of random numbers, with their paths.
    """

    def __init__(
        self, module: nn.Module, hooks: Iterable[Callable[..., Any]] | None = None, *, alone: bool = False
    ) -> None:
        self.places: list[TrackedObject] = []
        self.codes: list[types.CodeType] = []
        self.generators: list[tuple[str, NumPyGenerator]] = []
        self._is_inside = True
        self._known: set[Any] = set()
        self._classes: list[type] = []
        self._functions: list[types.FunctionType] = []
        self._globals: dict[int, TrackedObject] = {}
        for path, part in [("", module)] if alone else module.named_modules():
            self._known.add(id(part))
            self._namespace(f"self.{path}" if path else "self", part, 0)
        self._is_inside = False
        if alone:
            self._functions, self._classes = [], []
        self._follow_code()
        self.forward_places = len(self.places)
        for hook in _hooks_of_parts(module) if hooks is None else hooks:
            self._hook(hook)
        self._follow_code()

    def _follow_code(self) -> None:
        # Code leads to more code: attributes of classes, and globals of functions, hold functions and classes.
        while self._functions or self._classes:
            if self._classes:
                self._class(self._classes.pop())
            else:
                self._function(self._functions.pop())

    def _hook(self, hook: Any) -> None:
        """Add the objects of a hook: a function, the method of an object, a partial function, or an object."""
        if isinstance(hook, functools.partial):
            for part in (hook.func, *hook.args, *hook.keywords.values()):
                self._hook(part)
            return
        owner = getattr(hook, "__self__", hook)
        name = getattr(hook, "__qualname__", type(hook).__name__)
        # A separate namespace, for an object that no other one names.
        place = self._add(TrackedObject(name, {"": owner}))
        self._walk(name, (place, ""), hook, 0)
        if owner is not hook:
            self._walk(type(owner).__name__, (place, ""), owner, 0)

    @contextlib.contextmanager
    def undoing(self) -> Iterator[list[TrackedObject]]:
        """Context whose changes of objects are undone; afterwards, the list has the changed objects."""
        kept = [(place, place.before) for place in self.places]
        for place in self.places:
            place.before = place.entries(place.traced)
        changed: list[TrackedObject] = []
        try:
            yield changed
        finally:
            for place, before in kept:
                if place.is_changed():
                    changed.append(place)
                    place.restore()
                place.before = before

    def bind(self, copies: Mapping[int, Any]) -> None:
        """Set the traced objects, given the twin's copies of objects by the `id` of the originals."""
        for place in self.places:
            place.bind(copies)
        self.generators = [(path, copies.get(id(generator), generator)) for path, generator in self.generators]

    def restore(self) -> None:
        """Undo the changes of objects outside of the module."""
        for place in self.places:
            if not place.is_inside:
                place.restore()

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in containers and objects."""
        for place in self.places:
            if not place.is_module:
                yield from (value for value in place.entries(place.original).values() if isinstance(value, Tensor))

    def _add(self, place: TrackedObject) -> TrackedObject:
        place.is_inside = self._is_inside
        self.places.append(place)
        return place

    def _is_new(self, value: object) -> bool:
        if id(value) in self._known or len(self._known) > _MOST:
            return False
        # Ids stay valid, since the user's objects hold all values.
        self._known.add(id(value))
        return True

    def _namespace(self, path: str, owner: Any, depth: int) -> None:
        place = self._add(TrackedObject(path, vars(owner), owner))
        self._classes += type(owner).__mro__
        for name, value in list(vars(owner).items()):
            is_tracked = not isinstance(owner, nn.Module) or name not in MODULE_STATE
            if is_tracked and not is_parameter_list(owner, name):
                self._walk(f"{path}.{name}", (place, name), value, depth)

    def _walk(self, path: str, root: tuple[TrackedObject, str], value: Any, depth: int) -> None:
        """Add a value, and the values in it."""
        if isinstance(value, (types.FunctionType, types.MethodType)):
            self._add_function(value)
        elif isinstance(value, type):
            self._classes.append(value)
        elif isinstance(value, NumPyGenerator):
            if self._is_new(value):
                self.generators.append((path, value))
        elif isinstance(value, (list, deque, set, dict)):
            if depth <= DEPTH and self._is_new(value):
                self._add(TrackedObject(path, value, root=root))
                self._contents(path, root, value, depth)
        elif isinstance(value, tuple):
            if depth <= DEPTH:
                self._contents(path, root, value, depth)
        elif not isinstance(value, Tensor) and is_object(value) and depth <= DEPTH and self._is_new(value):
            self._namespace(path, value, depth + 1)

    def _contents(self, path: str, root: tuple[TrackedObject, str], value: Any, depth: int) -> None:
        if isinstance(value, dict):
            pairs = list(zip(dict.keys(value), dict.values(value), strict=True))
        else:
            pairs = list(enumerate(elements(value)))
        for key, item in pairs:
            self._walk(f"{path}[{key!r}]", root, item, depth + 1)

    def _class(self, kind: type) -> None:
        """Add the functions of a user's class, and the objects in its attributes."""
        if kind.__module__.split(".")[0] in FOREIGN or not _is_users(kind) or not self._is_new(kind):
            return
        place = self._add(TrackedObject(kind.__name__, kind))
        for name, value in list(vars(kind).items()):
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self._add_function(function)
            elif _is_state(name, value):
                self._walk(f"{kind.__name__}.{name}", (place, name), value, 1)

    def _add_function(self, value: types.FunctionType | types.MethodType) -> None:
        function = value.__func__ if isinstance(value, types.MethodType) else value
        # A decorator with functools.wraps stores the user's function there.
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType) or not is_users_file(function.__code__.co_filename):
            return
        if self._is_new(function):
            self._functions.append(function)

    def _function(self, function: types.FunctionType) -> None:
        """Add the variables that a function reads or sets outside of itself."""
        code = function.__code__
        for cell, name in zip(function.__closure__ or (), code.co_freevars, strict=True):
            if self._is_new(cell):
                place = self._add(TrackedObject(f"{function.__qualname__}.{name}", cell))
                if not _is_empty(cell):
                    self._walk(place.path, (place, ""), cell.cell_contents, 0)
        place = TrackedObject(function.__qualname__, function)
        if place.entries(function):
            self._add(place)
            for name, value in place.entries(function).items():
                self._walk(f"{place.path}.{name}", (place, name), value, 0)
        for names in self._names(code):
            for name in names:
                self._global(function.__globals__, name, names)

    def _names(self, code: types.CodeType) -> Iterator[tuple[str, ...]]:
        """Yield the names in the code of a function, and of the functions inside of it."""
        self.codes.append(code)
        yield code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._names(constant)

    def _global(self, table: dict[str, Any], name: str, names: tuple[str, ...]) -> None:
        """Add a global variable; of an imported module, add the variables that `names` may look up in it."""
        if (id(table), name) in self._known:
            return
        value = table.get(name)
        # An imported module is not walked whole: the code of a function names what it uses.
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None)
            if file and is_users_file(file) and value.__name__.split(".")[0] not in FOREIGN and names:
                for inner in names:
                    self._global(vars(value), inner, ())
            return
        self._known.add((id(table), name))
        if id(table) not in self._globals:
            self._globals[id(table)] = self._add(TrackedObject(str(table.get("__name__")), table, names={}))
        place = self._globals[id(table)]
        assert place.names is not None
        place.names[name] = None
        self._walk(f"{place.path}.{name}", (place, name), value, 0)


def _hooks_of_parts(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks of submodules; those of the module itself run around it."""
    for part in module.modules():
        for table in HOOKS if part is not module else ():
            yield from (hook for hook in vars(part)[table].values() if not is_autoshard(hook))


def _is_users(kind: type) -> bool:
    # Classes have no file; functions added to a class later are of another module.
    functions = (value for value in vars(kind).values() if isinstance(value, types.FunctionType))
    files = (each.__code__.co_filename for each in functions if each.__module__ == kind.__module__)
    return all(map(is_users_file, files))
