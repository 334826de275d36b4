"""The changes that `forward` makes to Python objects: attributes, containers, and variables of functions."""

from __future__ import annotations

import contextlib
import dis
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard.capture._torch import FakeTensor, storage_of, traced_node
from autoshard.capture.capture_errors import code_line, node_line
from autoshard.capture.python.counters import FILLABLE, ContainerStandIn, Counter, added_entries, container_stand_in
from autoshard.capture.python.guards import ABSENT, CONTAINERS, copy_value, is_equivalent, is_plain
from autoshard.capture.python.reachable import (
    MODULE_STATE,
    NumPyGenerator,
    Reachable,
    TrackedObject,
    elements,
    is_parameter_list,
)
from autoshard.errors import CaptureError

_EMPTY: Mapping[Any, Any] = {}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A computed tensor, by its index among those that the call stores; or the number in it."""

    number: int
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class PreviousValue:
    """The value that an object held under a key before the call."""

    key: Any


@dataclass(slots=True, eq=False)
class Mutation:
    """A change of an object, or of one attribute or variable of a namespace, by a call.

    Attributes:
        path: the user's expression, such as `self.layers.0.loss`.
        place: the object or the namespace.
        entries: the new entries, with `TensorSlot`, `PreviousValue` and counters in them.
        removed: the removed keys.
        mode: `"update"` if entries replace those of their keys, `"replace"` if they replace all, `"append"` if they
            are appended.
        line: the user's line that makes the change.
        is_write_only: True if nothing in the call depends on the old entries, or other guards compare them.
    """

    path: str
    place: TrackedObject
    entries: Mapping[Any, Any]
    removed: Sequence[Any]
    mode: str
    line: str
    is_write_only: bool = False
    _before: dict[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        place = self.place
        before = place.before if place.traced is place.original else self._now()
        keys = before if place.is_ordered else (*self.entries, *self.removed)
        self._before = {key: _kind(before.get(key, ABSENT)) for key in keys}

    @property
    def name(self) -> str:
        """The name by which code accesses the place."""
        return self.path.rpartition(".")[2]

    def _now(self) -> dict[Any, Any]:
        return self.place.entries(self.place.original)

    def holds(self) -> bool:
        """Return True if the entries that the call changes are as they were at the capture."""
        if self.is_write_only:
            return True
        now = self._now()
        if self.place.is_ordered and len(now) != len(self._before):
            return False
        return all(_is_kind(now.get(key, ABSENT), kind) for key, kind in self._before.items())

    def result(self, tensors: Sequence[Tensor]) -> dict[Any, Any]:
        """Return the entries of one call, given the tensors that it stores."""
        now = self._now()
        entries = {key: build_value(value, now, tensors) for key, value in self.entries.items()}
        return dict(enumerate([*now.values(), *entries.values()])) if self.mode == "append" else entries

    def apply(self, result: Mapping[Any, Any]) -> None:
        """Write the entries of `result` to the place."""
        place = self.place
        removed = [*place.entries(place.original)] if self.mode == "replace" and not place.is_ordered else self.removed
        # First remove: this empties an ordered object, and the second call fills it.
        place.write(place.original, {}, removed)
        place.write(place.original, result)


def _kind(value: Any) -> Any:
    """Return the properties of an old value that a call may depend on."""
    # The graph does not depend on a tensor's data, which is an input of the next call.
    if isinstance(value, Tensor):
        return Tensor
    return (type(value), len(value)) if isinstance(value, (*CONTAINERS, deque)) else value


def _is_kind(value: Any, kind: Any) -> bool:
    now = _kind(value)
    return now == kind if isinstance(kind, tuple) else is_equivalent(now, kind)


def build_value(tree: Any, now: Mapping[Any, Any], tensors: Sequence[Tensor]) -> Any:
    """Fill the tensor slots of a value, and its previous values from `now`."""
    if isinstance(tree, TensorSlot):
        return tensors[tree.number].item() if tree.is_number else tensors[tree.number]
    if isinstance(tree, PreviousValue):
        return now[tree.key]
    if isinstance(tree, Counter):
        return tree.result()
    return _map_container(tree, lambda _, part: build_value(part, now, tensors))


def _map_container(container: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Map a function of keys and values over a container; return a value of another type unchanged."""
    kind = type(container)
    if isinstance(container, dict):
        contents = {key: function(key, value) for key, value in dict.items(container)}
        return contents if kind is dict else kind(contents)
    if not isinstance(container, (list, tuple, set, frozenset, deque)):
        return container
    parts = [function(place, value) for place, value in enumerate(elements(container))]
    if isinstance(container, deque):
        return deque(parts, container.maxlen)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor that `forward` stores in an attribute, a container or a variable.

    Attributes:
        name: the user's expression, such as `self.layers.0.auxiliary_loss`.
        differentiable: True if gradients flow into it.
    """

    name: str
    differentiable: bool


class Mutations:
    """Record of the changes that a call of a fake twin makes to the Python objects that its code can reach.

    Args:
        reachable: the objects of the user's module, bound to those of the twin.
        modules: `id` of a twin's module -> the user's module.
        counting: paths of numbers and containers replaced by stand-ins, which detect if anything depends on them.

    Attributes:
        changes: the mutations of the last call.
        kept: paths and tensors that the call stores, in the order of their slots.
        depended: paths of `counting` on which something depends.
        lines: `id` of the user's module and name of an attribute -> the line that set it.
        unknown_sizes: lines that set attributes to a dynamic size, by path.
    """

    def __init__(self, reachable: Reachable, modules: Mapping[int, nn.Module], counting: Sequence[str] = ()) -> None:
        self._reachable, self._modules, self._counting = reachable, modules, counting
        self.depended: list[str] = []
        self.lines: dict[tuple[int, str], str] = {}
        self.unknown_sizes: dict[str, str] = {}
        self._numbers: dict[str, Tensor] = {}
        self._originals: list[tuple[TrackedObject, Any, Any]] = []  # the values that stand-ins replace
        self._known: set[int] = set()
        self.changes: list[Mutation] = []
        self.kept: list[tuple[str, Tensor]] = []

    def note_state(self) -> None:
        """Record the entries of all objects before the call."""
        # Casts have replaced parameters of the twin, and of its lists.
        for place in self._reachable.places:
            if place.is_inside:
                place.before = place.entries(place.traced)
        self._known = {id(value) for place in self._reachable.places for value in place.before.values()}

    def note_number(self, symbol: Any, tensor: Tensor) -> None:
        """Record the tensor that a number is read from."""
        if isinstance(symbol, _SYMBOLS):
            self._numbers[str(symbol.node.expr)] = tensor.detach()

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context of the capture, after which objects outside of the module are restored."""
        try:
            yield
        finally:
            self._restore()
            # Mutations outlive the capture, but should not keep the twin alive.
            for place in self._reachable.places:
                place.traced, place.before = place.original, {}

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Context in which objects outside of the module are as before the call; afterwards they are as after it."""
        kept = [(place, place.before, place.entries(place.traced)) for place in self._reachable.places]
        self._reachable.restore()
        try:
            yield
        finally:
            for place, before, after in kept:
                place.before = after
                place.restore()
                place.before = before

    def _restore(self) -> None:
        self._remove_stand_ins()
        self._reachable.restore()

    def _remove_stand_ins(self) -> None:
        for place, key, original in self._originals:
            place.before[key] = original
            place.write(place.traced, {key: original})
        self._originals.clear()

    def begin(self) -> None:
        """Begin to record a call; torch.export may call `forward` more than once."""
        # Undo the changes of the previous call, which this one must not see.
        self._restore()
        self.changes, self.kept, self._numbers = [], [], {}
        for place in self._reachable.places if self._counting else ():
            if place.root is None:
                for key, value in place.before.items():
                    path = _path(place, key)
                    if path in self._counting and type(value) in (int, float):
                        current = partial(_entry, place, key)
                        self._insert_stand_in(place, key, Counter(path, self.depended, current))
            elif place.path in self._counting and type(place.original) in FILLABLE:
                owner, key = place.root
                self._insert_stand_in(owner, key, container_stand_in(place.original, place.path, self.depended))

    def _insert_stand_in(self, place: TrackedObject, key: Any, value: Any) -> None:
        self._originals.append((place, key, place.before[key]))
        place.before[key] = value
        place.write(place.traced, {key: value})

    def end(self) -> None:
        """End the record of a call."""
        # Attributes first, so that their names in the outputs do not depend on other objects.
        for find in (self._tensor_attributes, self._mutations):
            for place in self._reachable.places:
                self.changes += find(place)
        self._remove_stand_ins()  # torch.export compares attributes with their values before the call

    def check_constant(self, constant: Tensor, line: str) -> None:
        """Raise a `CaptureError` if a graph reads a tensor of an object in which the call stores other tensors."""
        for mutation in self.changes:
            # The next call reads attributes of modules as inputs.
            for value in () if mutation.place.is_module else mutation.place.before.values():
                if isinstance(value, Tensor) and storage_of(value) == storage_of(constant):
                    raise CaptureError(
                        f"{line or mutation.line} reads a tensor in {mutation.path}, which forward changes: what one "
                        "call leaves, the next one can read from attributes and buffers of modules alone. Set an "
                        "attribute to the tensor (self.memory = h), or register a buffer."
                    )

    @contextlib.contextmanager
    def refusing(self, line: str = "") -> Iterator[None]:
        """Context in which a line runs code that runs after `forward` in steps, and may change no object."""
        # Graphs generate their code when they first run.
        places = [place for place in self._reachable.places if not isinstance(place.owner, fx.GraphModule)]
        before = [place.entries(place.traced) for place in places]
        yield
        for place, old in zip(places, before, strict=True):
            now = place.entries(place.traced)
            changed = [key for key in {**old, **now} if old.get(key, ABSENT) is not now.get(key, ABSENT)]
            if changed:
                path = _path(place, changed[0]) if place.is_namespace else place.path
                raise CaptureError(
                    f"{line or self.line_of(path)} runs code in the midst of backward that changes {path}: it would "
                    "change it while the step is captured, and not in the steps. Look at gradients behind backward(), "
                    "in .grad, or compute them in forward, by torch.autograd.grad."
                )

    def generators(self) -> list[tuple[str, NumPyGenerator]]:
        """Return NumPy's generators of random numbers that the call can reach, with their paths."""
        return self._reachable.generators

    def check_traced(self, tensor: Tensor, path: str, line: str = "") -> None:
        """Raise a `CaptureError` if the call stores a tensor that its graph does not compute."""
        if isinstance(tensor, FakeTensor) and traced_node(tensor) is None and id(tensor) not in self._known:
            raise CaptureError(
                f"{line or self.line_of(path)} keeps a tensor in {path} that forward does not compute: a hook, the "
                "backward of a function, or a transform of torch.func does, for which the graph has no place. Let "
                "forward compute it, with torch.autograd.grad where it is a gradient, or look at gradients behind "
                "backward(), in .grad."
            )

    def counters(self, numbers: Collection[str]) -> Iterator[str]:
        """Yield paths of possible counters, and of containers only filled; `numbers` are those that the call reads."""
        for mutation in self.changes:
            place = mutation.place
            if place.root is not None and type(place.original) in FILLABLE:
                if place.root[0].before.get(place.root[1]) is place.traced:
                    yield place.path
            elif place.is_namespace:
                values = [(value, place.before.get(key)) for key, value in mutation.entries.items()]
                if place.is_module:
                    if mutation.path in numbers and not all(is_equivalent(now, before) for now, before in values):
                        yield mutation.path
                elif not place.is_inside and all(type(value) in (int, float) for pair in values for value in pair):
                    yield mutation.path

    def _tensor_attributes(self, place: TrackedObject) -> Iterator[Mutation]:
        """Yield the attributes of a module that the call set to tensors."""
        for key, value in place.changes()[0].items() if place.is_module else ():
            if isinstance(value, Tensor):
                path = _path(place, key)
                line = self._line(place, path, {key: value})
                self.check_traced(value, path, line)
                slot = TensorSlot(self._keep(path, value))
                yield Mutation(path, place, {key: slot}, [], "update", line, is_write_only=True)

    def _mutations(self, place: TrackedObject) -> Iterator[Mutation]:
        """Yield the changes of an object, except attributes of modules that were set to tensors."""
        stand_in = place.root and place.root[0].traced_value(place.root[1])
        if isinstance(stand_in, ContainerStandIn) and stand_in.path == place.path:
            entries, cleared = added_entries(stand_in)
            if entries or cleared:
                mode = "replace" if cleared else "update" if isinstance(place.original, dict) else "append"
                yield self._mutation(place.path, place, entries, mode=mode, is_write_only=True)
            return
        changed, removed = place.changes()
        if place.is_namespace:
            if place.is_module:
                # An attribute that is set to its old value may have another value before the next call.
                now = place.entries(place.traced)
                changed |= {key: now[key] for key in now if (id(place.owner), key) in self.lines}
            for key, value in changed.items():
                if is_parameter_list(place.owner, key):
                    continue
                path = _path(place, key)
                if not place.is_inside:
                    is_write_only = isinstance(value, Counter) or isinstance(place.owner, nn.Module)
                    yield self._mutation(path, place, {key: value}, is_write_only=is_write_only)
                elif self._is_effect(place, key, value):
                    # Other guards compare values of modules that are read, and settings of their objects.
                    is_guarded = place.is_module or copy_value(value) is not ABSENT
                    yield self._mutation(path, place, {key: value}, is_write_only=is_guarded)
            if removed and not place.is_inside:
                yield self._mutation(place.path, place, {}, removed)
        elif place.is_changed():
            before = list(place.before.values())
            mode = "replace" if place.is_ordered else "update"
            after = list(changed.values())
            is_longer = len(after) >= len(before) and all(map(is_, after, before))
            if isinstance(place.original, (list, deque)) and is_longer:
                changed, mode = dict(enumerate(after[len(before) :])), "append"
            assert place.root is not None
            owner, name = place.root
            # Another guard compares a container of settings as a whole.
            is_guarded = place.is_inside and copy_value(owner.traced_value(name)) is not ABSENT
            yield self._mutation(place.path, place, changed, removed, mode=mode, is_write_only=is_guarded)

    def _is_effect(self, place: TrackedObject, key: str, value: Any) -> bool:
        """Return True if every call sets an attribute of the module, or of one of its objects, to this value."""
        if isinstance(value, torch.SymInt) and str(value.node.expr) not in self._numbers:  # no tensor has the size
            path = _path(place, key)
            self.unknown_sizes[path] = self._line(place, path, {key: value})
            return False
        if not place.is_module:
            return not isinstance(value, ContainerStandIn)
        if isinstance(value, (Tensor, nn.Module, ContainerStandIn)):
            return False
        # torch.export itself changes attributes, such as `forward`.
        is_set = (id(place.owner), key) in self.lines
        is_state = isinstance(value, (*CONTAINERS, Counter)) or copy_value(value) is ABSENT
        return is_set or (is_state and key not in MODULE_STATE)

    def _mutation(
        self,
        path: str,
        place: TrackedObject,
        changed: Mapping[Any, Any],
        removed: Sequence[Any] = (),
        *,
        mode: str = "update",
        is_write_only: bool = False,
    ) -> Mutation:
        line = self._line(place, path, changed)
        old = {id(value): key for key, value in place.before.items() if not is_plain(value)} if place.is_ordered else {}
        # Elements of an ordered object that only move are taken from the run, not from the capture.
        entries = {}
        for key, value in changed.items():
            where = path if place.is_namespace else f"{path}[{key!r}]"
            entries[key] = PreviousValue(old[id(value)]) if id(value) in old else self.tree(where, value, line)
        return Mutation(path, place, entries, removed, mode, line, is_write_only)

    def _keep(self, path: str, tensor: Tensor) -> int:
        """Register a tensor as an extra output under a unique path, and return its index."""
        # A path may keep several tensors; names of outputs have to differ.
        paths = [path for path, _ in self.kept]
        self.kept.append((path if path not in paths else f"{path} ({len(paths)})", tensor))
        return len(paths)

    def tree(self, path: str, value: Any, line: str) -> Any:
        """Replace the tensors of a value by slots."""
        if isinstance(value, _SYMBOLS):
            tensor = self._numbers.get(str(value.node.expr))
            if tensor is None:
                raise CaptureError(
                    f"{line} keeps a number in {path} that was computed of numbers in a tensor. Keep the tensor "
                    "(tensor.detach()), or what tensor.item() gives, as it is."
                )
            return TensorSlot(self._keep(path, tensor), is_number=True)
        if isinstance(value, Counter):
            return value
        if isinstance(value, FakeTensor):
            self.check_traced(value, path, line)
            return TensorSlot(self._keep(path, value))
        # The user's module instead of its copy.
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, (*CONTAINERS, deque)):
            return _map_container(value, lambda key, part: self.tree(f"{path}[{key!r}]", part, line))
        if any(isinstance(part, (FakeTensor, *_SYMBOLS)) for part in getattr(value, "__dict__", {}).values()):
            raise CaptureError(
                f"{line} keeps a {type(value).__name__} with tensors in {path}: no graph can hold such an object. Keep "
                "its tensors in attributes of the module, or in a dict."
            )
        return value

    def _line(self, place: TrackedObject, path: str, changed: Mapping[Any, Any]) -> str:
        """Return the user's line that changes an object."""
        lines = (self.lines.get((id(place.owner), key)) for key in changed)
        return next(filter(None, lines), None) or self.line_of(path, changed)

    def line_of(self, path: str, changed: Mapping[Any, Any] = _EMPTY) -> str:
        """Return the user's line that changes an object: a line that names it, if there is one."""
        # The code that changed the object has returned: search names in the code that can reach it.
        names = {path.partition("[")[0].rpartition(".")[2], *(key for key in changed if isinstance(key, str))}
        named = [(is_store, line) for name, is_store, line in self._named_lines if name in names]
        if named:
            return max(named, key=itemgetter(0))[1]  # the first line that stores, or else the first line
        tensors = [value for value in changed.values() if isinstance(value, FakeTensor)]
        nodes = [found[0] for tensor in tensors if (found := traced_node(tensor)) is not None]
        return next((line for line in map(node_line, nodes) if line), "forward")

    @cached_property
    def _named_lines(self) -> list[tuple[str, bool, str]]:
        """The names in the user's code, each with a flag (True if the line stores the name) and the line."""
        return [
            (step.argval, step.opname.startswith("STORE_"), code_line(code.co_filename, step.positions.lineno))
            for code in self._reachable.codes
            if code.co_name != "__init__"
            for step in dis.get_instructions(code)
            if isinstance(step.argval, str) and step.positions is not None and step.positions.lineno
        ]


def _entry(place: TrackedObject, key: Any) -> Any:
    """Return the value of the user's object under a key."""
    return place.entries(place.original)[key]


def _path(place: TrackedObject, key: Any) -> str:
    """Return the path of a variable or an attribute."""
    return place.path if isinstance(place.original, types.CellType) else f"{place.path}.{key}"
