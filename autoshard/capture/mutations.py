"""What `forward` leaves in Python objects: tensors in containers and objects, and all in variables of functions."""

from __future__ import annotations

import contextlib
import dis
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture._torch import FakeTensor, storage_of, traced_node
from autoshard.capture.capture_errors import code_line, node_line
from autoshard.capture.counters import FILLABLE, ContainerStandIn, Counter, added_entries, container_stand_in
from autoshard.capture.guards import ABSENT, CONTAINERS, copy_value, is_equivalent, is_plain
from autoshard.capture.reachable import MODULE_STATE, NumPyGenerator, Reachable, TrackedObject, elements
from autoshard.errors import CaptureError

_EMPTY: Mapping[Any, Any] = {}
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor that a call computes: its number among those that the call leaves; or the number in it."""

    number: int
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class PreviousValue:
    """What an object held under a key before the call."""

    key: Any


@dataclass(slots=True, eq=False)
class Mutation:
    """What a call does to an object, or to one variable of a namespace.

    Attributes:
        path: as a user writes it.
        place: the object or the namespace.
        entries: what is put into it, with `Slot`, `PreviousValue` and counters in it.
        removed: keys that are taken away.
        mode: whether entries replace what has their keys, replace all, or follow what is there.
        line: the user's that does it.
        is_blind: whether nothing in the call depends on what was there.
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
        """By which code reaches it."""
        return self.path.rpartition(".")[2]

    def _now(self) -> dict[Any, Any]:
        return self.place.entries(self.place.original)

    def holds(self) -> bool:
        """Whether what the call changes is as it was at the capture."""
        if self.is_write_only:
            return True
        now = self._now()
        if self.place.is_ordered and len(now) != len(self._before):
            return False
        return all(_is_kind(now.get(key, ABSENT), kind) for key, kind in self._before.items())

    def result(self, tensors: Sequence[Tensor]) -> dict[Any, Any]:
        """The entries of one call, by the tensors that it leaves."""
        now = self._now()
        entries = {key: _build_value(value, now, key, tensors) for key, value in self.entries.items()}
        return dict(enumerate([*now.values(), *entries.values()])) if self.mode == "append" else entries

    def apply(self, result: Mapping[Any, Any]) -> None:
        """Put them there."""
        place = self.place
        removed = [*place.entries(place.original)] if self.mode == "replace" and not place.is_ordered else self.removed
        place.write(place.original, {}, removed)
        place.write(place.original, result)


def _kind(value: Any) -> Any:
    """What a call that changes a value may depend on of it."""
    if isinstance(value, Tensor):
        return Tensor
    return (type(value), len(value)) if isinstance(value, (*CONTAINERS, deque)) else value


def _is_kind(value: Any, kind: Any) -> bool:
    own = _kind(value)
    return own == kind if isinstance(kind, tuple) else is_equivalent(own, kind)


def _build_value(tree: Any, now: Mapping[Any, Any], key: Any, tensors: Sequence[Tensor]) -> Any:
    """A value that a call leaves."""
    if isinstance(tree, TensorSlot):
        return tensors[tree.number].item() if tree.is_number else tensors[tree.number]
    if isinstance(tree, PreviousValue):
        return now[tree.key]
    if isinstance(tree, Counter):
        return tree.apply_to(now[key])
    return _map_container(tree, lambda _, one: _build_value(one, now, key, tensors))


def _map_container(container: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A container of the same kind with the results of a function of keys and values; what is none, as it is."""
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


class Mutations:
    """Sees what a call of a fake twin does to the Python objects that its code can reach.

    Attributes of modules that are tensors, plain values, or containers of these are left to `PythonState`, as plain
    attributes of the module's objects are.

    Args:
        reachable: the objects of the user's module.
        copies: what the twin has in the place of the module's objects, by their `id`.
        modules: the user's modules by the `id` of the twin's.
        counting: paths of numbers and containers in whose place stand-ins are, to find out whether anything depends
            on them.
        depended: filled with the paths of those on which something does.

    Attributes:
        found: what was done.
        kept: paths and tensors that the call leaves, in the order of the numbers of their slots.
    """

    def __init__(
        self,
        reachable: Reachable,
        copies: Mapping[int, Any],
        modules: Mapping[int, nn.Module],
        counting: Sequence[str],
        depended: list[str],
    ) -> None:
        reachable.bind(copies)
        self._reachable, self._copies, self._modules = reachable, copies, modules
        self._counting, self._depended = counting, depended
        self._numbers: dict[str, Tensor] = {}
        self._originals: list[tuple[TrackedObject, Any, Any]] = []  # what stand-ins are for
        self._known: set[int] = set()
        self.found: list[Mutation] = []
        self.kept: list[tuple[str, Tensor]] = []

    def note_state(self) -> None:
        """Know what objects hold before the call: casts have put other parameters into the twin, and into its lists."""
        for place in self._reachable.inside:
            place.before = place.entries(place.traced)
        places = (*self._reachable.inside, *self._reachable.outside)
        self._known = {id(value) for place in places for value in place.before.values()}

    def note_number(self, symbol: Any, tensor: Tensor) -> None:
        """Know the tensor that a number is taken from."""
        if isinstance(symbol, _SYMBOLS):
            self._numbers[str(symbol.node.expr)] = tensor.detach()

    def knows_number(self, symbol: Any) -> bool:
        """Whether a number is that of a tensor that a call can leave."""
        return isinstance(symbol, _SYMBOLS) and str(symbol.node.expr) in self._numbers

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context of the capture: behind it, objects outside of the module are as they were."""
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        self._remove_stand_ins()
        self._reachable.restore()

    def _remove_stand_ins(self) -> None:
        for place, key, original in self._originals:
            place.before[key] = original
            place.write(place.traced, {key: original})
        self._originals.clear()

    def begin(self) -> None:
        """The call begins, be it for another time."""
        self._restore()
        self.found, self.kept, self._numbers = [], [], {}
        for place in (*self._reachable.inside, *self._reachable.outside) if self._counting else ():
            if place.root is not None and place.path in self._counting and type(place.original) in FILLABLE:
                owner, key = place.root
                self._insert_stand_in(owner, key, container_stand_in(place.original, place.path, self._depended))
        for place in self._reachable.outside if self._counting else ():
            for key, value in place.before.items() if place.is_namespace else ():
                path = _path(place, key)
                if path in self._counting and type(value) in (int, float):
                    self._insert_stand_in(place, key, Counter(path, (), self._depended))

    def _insert_stand_in(self, place: TrackedObject, key: Any, value: Any) -> None:
        self._originals.append((place, key, place.before[key]))
        place.before[key] = value
        place.write(place.traced, {key: value})

    def end(self) -> None:
        """The call is done."""
        for place in self._reachable.inside:
            self.found += self._mutations(place, is_inside=True)
        for place in self._reachable.outside:
            self.found += self._mutations(place, is_inside=False)
        self._remove_stand_ins()  # torch.export compares attributes with what they were

    def check_constant(self, constant: Tensor, line: str) -> None:
        """`CaptureError` if a graph reads a tensor of an object that the call puts others into."""
        for mutation in self.found:
            for value in mutation.place.before.values():
                if isinstance(value, Tensor) and storage_of(value) == storage_of(constant):
                    raise CaptureError(
                        f"{line or mutation.line} reads a tensor in {mutation.path}, which forward changes: what one "
                        "call leaves, the next one can read from attributes and buffers of modules alone. Set an "
                        "attribute to the tensor (self.memory = h), or register a buffer."
                    )

    @contextlib.contextmanager
    def refusing(self, line: str) -> Iterator[None]:
        """Context in which code of a line runs that steps run behind `forward`: it may change no object."""
        places = (*self._reachable.inside, *self._reachable.outside)
        before = [place.entries(place.traced) for place in places]
        yield
        for place, old in zip(places, before, strict=True):
            now = place.entries(place.traced)
            changed = [key for key in {**old, **now} if old.get(key, ABSENT) is not now.get(key, ABSENT)]
            if changed:
                path = _path(place, changed[0]) if place.is_namespace else place.path
                raise CaptureError(
                    f"{line} runs code in the midst of backward that changes {path}: it would change it while the step "
                    "is captured, and not in the steps. Look at gradients behind backward(), in .grad, or compute them "
                    "in forward, by torch.autograd.grad."
                )

    def generators(self) -> Iterator[tuple[str, NumPyGenerator]]:
        """NumPy's generators of random numbers that the call can reach, with their paths."""
        for path, generator in self._reachable.generators:
            yield path, self._copies.get(id(generator), generator)

    def check_traced(self, tensor: Tensor, path: str, line: str = "") -> None:
        """`CaptureError` if a tensor that the call leaves somewhere is none that its graph computes."""
        if isinstance(tensor, FakeTensor) and traced_node(tensor) is None and id(tensor) not in self._known:
            raise CaptureError(
                f"{line or self.line_of(path)} keeps a tensor in {path} that forward does not compute: a hook, the "
                "backward of a function, or a transform of torch.func does, for which the graph has no place. Let "
                "forward compute it, with torch.autograd.grad where it is a gradient, or look at gradients behind "
                "backward(), in .grad."
            )

    def counters(self) -> Iterator[str]:
        """Paths of what the call may count with, or fill without looking."""
        for mutation in self.found:
            place = mutation.place
            if place.root is not None and type(place.original) in FILLABLE:
                if place.root[0].before.get(place.root[1]) is place.traced:
                    yield place.path
            elif place in self._reachable.outside and place.is_namespace:
                values = [(value, place.before.get(key)) for key, value in mutation.entries.items()]
                if all(type(one) in (int, float) for pair in values for one in pair):
                    yield mutation.path

    def _mutations(self, place: TrackedObject, *, is_inside: bool) -> Iterator[Mutation]:
        """What was done to an object, as far as it is a concern."""
        stand_in = place.root and place.root[0].traced_value(place.root[1])
        if isinstance(stand_in, ContainerStandIn) and stand_in.path == place.path:
            entries, cleared = added_entries(stand_in)
            if entries or cleared:
                mode = "replace" if cleared else "update" if isinstance(place.original, dict) else "append"
                yield self._mutation(place.path, place, entries, [], mode, is_blind=True)
            return
        if not place.is_changed():
            return
        changed, removed = place.changes()
        if place.is_namespace:
            for key, value in changed.items():
                if not is_inside or self._concerns(place, key, value):
                    # What of a module is read is guarded by itself.
                    is_blind = isinstance(value, Counter) or isinstance(place.owner, nn.Module)
                    yield self._mutation(_path(place, key), place, {key: value}, [], "update", is_blind=is_blind)
            if removed and not is_inside:
                yield self._mutation(place.path, place, {}, removed, "update")
        elif not is_inside or self._owns(place):
            before = list(place.before.values())
            mode = "replace" if place.is_ordered else "update"
            if isinstance(place.original, (list, deque)) and _starts_with(list(changed.values()), before):
                changed, mode = dict(enumerate(list(changed.values())[len(before) :])), "append"
            yield self._mutation(place.path, place, changed, removed, mode)

    def _mutation(
        self,
        path: str,
        place: TrackedObject,
        changed: Mapping[Any, Any],
        removed: Sequence[Any],
        mode: str,
        *,
        is_blind: bool = False,
    ) -> Mutation:
        line = self.line_of(path, changed)
        old = {id(value): key for key, value in place.before.items() if not is_plain(value)} if place.is_ordered else {}
        entries = {}
        for key, value in changed.items():
            where = path if place.is_namespace else f"{path}[{key!r}]"
            entries[key] = PreviousValue(old[id(value)]) if id(value) in old else self._tree(where, value, line)
        return Mutation(path, place, entries, removed, mode, line, is_blind)

    def _concerns(self, place: TrackedObject, key: str, value: Any) -> bool:
        """Whether an attribute of the module's, or of one of its objects, is left to this class."""
        is_modules = isinstance(place.owner, nn.Module)
        if is_modules and (isinstance(value, (Tensor, nn.Module)) or key in MODULE_STATE):
            return False
        if isinstance(value, torch.SymInt) and not self.knows_number(value):
            return False
        return not isinstance(value, (Counter, ContainerStandIn)) and copy_value(value) is ABSENT

    def _owns(self, place: TrackedObject) -> bool:
        """Whether the contents of a container of the module's are left to this class."""
        assert place.root is not None
        owner, name = place.root
        return copy_value(owner.traced_value(name)) is ABSENT

    def _keep(self, path: str, tensor: Tensor) -> int:
        """The number of a tensor that the call leaves; its path is made one that no other has."""
        paths = [path for path, _ in self.kept]
        self.kept.append((path if path not in paths else f"{path} ({len(paths)})", tensor))
        return len(paths)

    def _tree(self, path: str, value: Any, line: str) -> Any:
        """A value with slots for its tensors."""
        if isinstance(value, _SYMBOLS):
            tensor = self._numbers.get(str(value.node.expr))
            if tensor is None:
                raise CaptureError(
                    f"{line} keeps a number in {path} that was computed of numbers in a tensor. Keep the tensor "
                    "(tensor.detach()), or what tensor.item() gives, as it is."
                )
            return TensorSlot(self._keep(path, tensor), is_number=True)
        if isinstance(value, Counter):
            if value.path != path:
                self._depended.append(value.path)
            return value
        if isinstance(value, FakeTensor):
            self.check_traced(value, path, line)
            return TensorSlot(self._keep(path, value))
        if isinstance(value, nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, (*CONTAINERS, deque)):
            return _map_container(value, lambda key, one: self._tree(f"{path}[{key!r}]", one, line))
        if any(isinstance(one, (FakeTensor, *_SYMBOLS)) for one in getattr(value, "__dict__", {}).values()):
            raise CaptureError(
                f"{line} keeps a {type(value).__name__} with tensors in {path}: no graph can hold such an object. Keep "
                "its tensors in attributes of the module, or in a dict."
            )
        return value

    def line_of(self, path: str, changed: Mapping[Any, Any] = _EMPTY) -> str:
        """The user's line that changes something: one that names it, if there is one."""
        names = {path.partition("[")[0].rpartition(".")[2], *(key for key in changed if isinstance(key, str))}
        instructions = [(code, one) for code in self._reachable.codes for one in dis.get_instructions(code)]
        named = [(code, one) for code, one in instructions if one.argval in names]
        stored = [(code, one) for code, one in named if one.opname.startswith("STORE_")]
        for code, one in (*stored, *named):
            if one.positions is not None and one.positions.lineno and code.co_name != "__init__":
                return code_line(code.co_filename, one.positions.lineno)
        tensors = [value for value in changed.values() if isinstance(value, FakeTensor)]
        nodes = [found[0] for tensor in tensors if (found := traced_node(tensor)) is not None]
        return next((line for line in map(node_line, nodes) if line), "forward")


def _path(place: TrackedObject, key: Any) -> str:
    """Of a variable or an attribute."""
    return place.path if isinstance(place.original, types.CellType) else f"{place.path}.{key}"


def _starts_with(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) >= len(before) and all(one is other for one, other in zip(now, before, strict=False))
