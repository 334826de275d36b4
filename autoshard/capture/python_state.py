"""What a capture reads of the state of Python, and what `forward` leaves in it: flags, numbers, submodules, hooks.

A graph holds what it read as it was. So that it serves no call that would have run otherwise, what was read becomes
guards; so that a call leaves behind what it does on one device, what was set is set again behind every call.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.capture._torch import around_dynamo, attribute_patch, pytree
from autoshard.capture.capture_errors import running_line
from autoshard.capture.conditions import Conditions
from autoshard.capture.counters import FILLABLE, ContainerStandIn, Counter
from autoshard.capture.guards import (
    ABSENT,
    CONTAINERS,
    HOOKS,
    Guards,
    TableGuard,
    ValueGuard,
    copy_value,
    is_equivalent,
    is_plain,
)
from autoshard.capture.mutations import Mutation, Mutations
from autoshard.capture.reachable import FOREIGN, MODULE_STATE, Reachable, is_object
from autoshard.capture.traced_parameters import TracedParameters
from autoshard.errors import InputError

# Of the attributes that every module has: training flags are part of a call's signature, parameters and buffers are
# inputs of the graph, submodules and hooks are guarded as tables.
_MODULE_ATTRIBUTES = MODULE_STATE
_METHODS = frozenset(vars(nn.Module)) - {"forward"}  # which nobody sets anew on a module
_MOST_STATES = 4  # graphs of one kind of call that its own changes of what it reads may ask for
_DEPTH = 4  # of objects that hold objects


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """What `forward` leaves in an attribute.

    Attributes:
        path: of the attribute.
        table: where it stands.
        name: its key there.
        value: what it is set to; or a counter, with what is done to the number in the attribute `origin`.
        origin: the table and the key of that number, as it is before the call.
        line: the user's that set it; empty where it was changed in another way.
    """

    path: str
    table: dict[str, Any]
    name: str
    value: Any
    origin: tuple[Mapping[str, Any], str] | None = None
    line: str = ""

    def result(self) -> Any:
        """What the attribute is after a call, by what is there before it."""
        if self.origin is None:
            return copy_value(self.value)
        table, name = self.origin
        return self.value.apply_to(table[name])

    def apply(self, result: Any) -> None:
        """Put it there: into the container that is there where that was filled and not set."""
        held = self.table.get(self.name)
        if self.line or not isinstance(held, (list, dict, set)):
            self.table[self.name] = result
            return
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(result)


@dataclass(frozen=True, slots=True, eq=False)
class AddedHook:
    """A hook that a call registers on a submodule, as models do that are asked for more outputs.

    It runs where the submodule does, which is when another call is captured.
    """

    module: nn.Module
    table: str
    hook: Callable[..., Any]
    with_kwargs: bool

    def apply(self) -> None:
        """Register it, unless that is done."""
        if self.hook not in getattr(self.module, self.table).values():
            register = (
                self.module.register_forward_hook
                if self.table == "_forward_hooks"
                else self.module.register_forward_pre_hook
            )
            register(self.hook, with_kwargs=self.with_kwargs)


@dataclass(slots=True, eq=False)
class PythonState:
    """The state of Python in a captured call.

    Attributes:
        guards: what of it the graph depends on.
        effects: what a call changes in it.
        mutations: what it does to objects beside that, with tensors that it computes.
        counters: paths of numbers that the call reads and sets to others.
        counted: whether these are counters, on which nothing depends.
        conditions: what of the numbers in its inputs the graph depends on.
        hooks: those that a call registers.
    """

    guards: Guards = field(default_factory=Guards)
    effects: tuple[Effect, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    counters: tuple[str, ...] = ()
    are_counters_unread: bool = False
    conditions: Conditions = field(default_factory=Conditions)
    hooks: tuple[AddedHook, ...] = ()

    def apply_effects(self, tensors: Sequence[Tensor] = ()) -> None:
        """Change the state as a call does that computes these tensors for mutations."""
        results = [effect.result() for effect in self.effects]
        contents = [mutation.result(tensors) for mutation in self.mutations]
        for effect, result in zip(self.effects, results, strict=True):
            effect.apply(result)
        for mutation, content in zip(self.mutations, contents, strict=True):
            mutation.apply(content)
        for hook in self.hooks:
            hook.apply()

    def invalidating_effects(self) -> list[Effect | Mutation]:
        """The effects of such calls by which the guards do not hold now."""
        changed = {subject for subject, _ in self.guards.changes()}
        effects: list[Effect | Mutation] = [*self.effects, *self.mutations]
        return [effect for effect in effects if f"the attribute {effect.path}" in changed]


def check_invalidating_effects(known: Sequence[PythonState]) -> None:
    """`InputError` where a kind of call asks for one graph after another, because it changes what it reads.

    Args:
        known: the states that it has graphs for; the one that it is in now is none of them.
    """
    changed = [effect for state in known for effect in state.invalidating_effects()]
    for effect in changed:
        count = sum(effect.path == other.path for other in changed)
        if count >= _MOST_STATES:
            where = f" ({effect.line})" if effect.line else ""
            raise InputError(
                f"forward reads {effect.path} and changes it in every call{where}, and what it computes depends on it: "
                f"each value would need a program of its own, and there are {count}. Keep the number in a buffer "
                f'(self.register_buffer("{effect.name}", torch.zeros(()))) and change that in forward; change the '
                "attribute outside of forward, to few values; or fill a container without looking into it."
            )


@dataclass(slots=True, eq=False)
class _WatchedModule:
    """A module of the twin, while it runs.

    Attributes:
        path: as a user writes it.
        twin: the module.
        original: what it is the twin of.
        read: names of attributes that were read, in order.
        fresh: names of those that were set before they were read: what they were before means nothing.
        lines: the user's lines that set attributes.
        ends: what attributes were when `forward` was done, where it may have changed them.
    """

    path: str
    fake: nn.Module
    original: nn.Module
    read: dict[str, None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    lines: dict[str, str] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=dict)


class StateWatch:
    """Sees which attributes of its modules the `forward` of a fake twin reads and sets, in modules of any class.

    Args:
        module: what the twin is one of: guards and effects are about this.
        twin: the twin.
        reachable: the objects that code of the module can reach.
        copies: what the twin has in the place of the module's objects, by their `id`.
        counting: paths of numbers and containers in whose place stand-ins are, to find out whether anything depends on
            them.

    Attributes:
        depended: paths of these on which something did depend.
        mutations: what is done to objects.
        own_tensors: puts tensors of the twin in the place of the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        twin: nn.Module,
        reachable: Reachable,
        copies: Mapping[int, Any],
        counting: Sequence[str] = (),
    ) -> None:
        originals = dict(module.named_modules())
        self._root = twin
        self._parts = {
            id(part): _WatchedModule(f"self.{path}" if path else "self", part, originals[path])
            for path, part in twin.named_modules()
            if path in originals
        }
        self._running = False
        self._counting = counting
        self._hooked: set[tuple[int, str, int]] = set()
        self._added: tuple[AddedHook, ...] = ()
        self._origins: dict[str, tuple[dict[str, Any], str]] = {}
        self.depended: list[str] = []
        modules = {id(part.fake): part.original for part in self._parts.values()}
        self.mutations = Mutations(reachable, copies, modules, counting, self.depended)
        self.traced_parameters = TracedParameters(module, twin)
        for part in self._parts.values():
            for name, value in vars(part.fake).items():
                path = f"{part.path}.{name}"
                if path in counting and type(value) not in FILLABLE:
                    self._origins[path] = vars(part.original), name
                    vars(part.fake)[name] = Counter(path, (), self.depended)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the export; the last that is entered, so that nothing but `forward` is seen."""
        hooks = (
            self._root.register_forward_pre_hook(self._begin),
            self._root.register_forward_hook(self._end, prepend=True),
        )
        reader, setter = self._reader(), self._setter(nn.Module.__setattr__)
        patches = contextlib.ExitStack()

        def patch() -> None:
            patches.enter_context(attribute_patch(nn.Module, "__getattribute__", reader))
            patches.enter_context(attribute_patch(nn.Module, "__setattr__", setter))

        try:
            with around_dynamo(patches.close, patch), patches:  # Dynamo can't read how attributes are watched
                patch()
                yield
        finally:
            self._running = False
            for hook in hooks:
                hook.remove()

    def check_constant(self, constant: Tensor, line: str) -> None:
        """`CaptureError` if a tensor may not be a constant of the graph: another call would find something else."""
        self.mutations.check_constant(constant, line)
        self.traced_parameters.check_constant(constant, line)

    def _begin(self, *_: Any) -> None:
        self._running = True
        self._hooked = {(id(part), table, key) for part, table, key, _ in self._hooks()}

    def _hooks(self) -> Iterator[tuple[_WatchedModule, str, int, Callable[..., Any]]]:
        """The hooks of submodules; the root's run around the program."""
        for part in self._parts.values():
            for table in ("_forward_hooks", "_forward_pre_hooks") if part.fake is not self._root else ():
                for key, hook in vars(part.fake)[table].items():
                    yield part, table, key, hook

    def _added_hooks(self) -> Iterator[AddedHook]:
        for part, table, key, hook in self._hooks():
            if (id(part), table, key) not in self._hooked and not _holds_module(hook):
                yield AddedHook(part.original, table, hook, key in vars(part.fake)[f"{table}_with_kwargs"])

    def _end(self, *_: Any) -> None:
        self._running = False
        self._added = tuple(self._added_hooks())
        for part in self._parts.values():
            for name in dict.fromkeys([*part.lines, *part.read]):
                value = vars(part.fake).get(name, ABSENT)
                if isinstance(value, ContainerStandIn):
                    continue
                if name in part.lines or isinstance(value, (*CONTAINERS, Counter)):
                    part.ends[name] = value if isinstance(value, (Counter, torch.SymInt)) else self._copy_value(value)

    def _copy_value(self, value: Any) -> Any:
        """A copy of a value; torch.export takes back what containers are filled with."""
        copy = copy_value(value)
        if copy is ABSENT:
            self.depended += [leaf.path for leaf in pytree.tree_leaves(value) if isinstance(leaf, Counter)]
        return copy

    def _reader(self) -> Callable[[nn.Module, str], Any]:
        plain, parts = object.__getattribute__, self._parts

        def read(module: nn.Module, name: str) -> Any:
            if self._running:
                part = parts.get(id(module))
                if part is not None:
                    part.read[name] = None
            return plain(module, name)

        return read

    def _setter(self, plain: Callable[[nn.Module, str, Any], None]) -> Callable[[nn.Module, str, Any], None]:
        parts = self._parts

        def write(module: nn.Module, name: str, value: Any) -> None:
            part = parts.get(id(module)) if self._running else None
            if part is not None:
                if name not in part.read:
                    part.fresh.add(name)
                if not isinstance(value, (Tensor, nn.Module)):
                    part.lines[name] = running_line()
            plain(module, name, value)

        return write

    def state(self) -> PythonState:
        """What was seen."""
        found, effects = _GuardCollector(), list[Effect]()
        for part in self._parts.values():
            effects += self._effects(part)
            is_root = part.fake is self._root
            names = [
                name
                for name in part.read
                if name not in part.fresh and (name not in _MODULE_ATTRIBUTES or name == "_modules")
            ]
            found.module(part, [name for name in names if not (is_root and name == "forward")])
            if "_forward_hooks" in part.read and not is_root:  # the root's hooks run around the program
                tables = vars(part.original)
                found.hooks += [TableGuard(part.path, "hooks", tables[name]) for name in HOOKS]
        for path, twin, original in found.objects:
            effects += _object_effects(path, twin, original)
        reads = [read for read in found.reads if read.path not in self._counting]
        numbers = {read.path: read.value for read in found.reads if type(read.value) in (int, float)}
        counters = tuple(
            effect.path
            for effect in effects
            if effect.path in numbers and effect.line and not is_equivalent(effect.value, numbers[effect.path])
        )
        filled = (effect.path for effect in effects if type(effect.value) in FILLABLE and not effect.line)
        counters = (*counters, *filled, *self.mutations.counters())
        mutations = tuple(self.mutations.found)
        dependent = [mutation for mutation in mutations if not mutation.is_write_only]
        guards = Guards(reads, found.submodules, found.attributes, found.hooks, dependent)
        counted = bool(self._counting) and not self.depended
        return PythonState(guards, tuple(effects), mutations, counters, counted, hooks=self._added)

    def _effects(self, part: _WatchedModule) -> Iterator[Effect]:
        """What the call left in the attributes of a module."""
        held = vars(part.original)
        for name, value in part.ends.items():
            path, line = f"{part.path}.{name}", part.lines.get(name, "")
            if isinstance(value, Counter):
                if value.steps or value.path != path:
                    yield Effect(path, held, name, value, self._origins[value.path], line)
            elif isinstance(value, torch.SymInt) and not self.mutations.knows_number(value):
                warnings.warn(
                    f"{line} sets {path} to a size that calls may change: the parallelised module does not. Return "
                    "the size, or leave it out of dynamic.",
                    stacklevel=2,
                )
            elif value is ABSENT or isinstance(value, (nn.Module, torch.SymInt)):
                continue  # tensors are outputs of the graph; no object of the twin's is the module's
            elif line or (name not in _MODULE_ATTRIBUTES and name in held and not is_equivalent(held[name], value)):
                yield Effect(path, held, name, value, None, line)


def _holds_module(hook: Callable[..., Any]) -> bool:
    """Return whether a hook may be for the twin's module alone: anything but a function that closes over no module."""
    if not isinstance(hook, FunctionType):
        return True
    return any(isinstance(value, nn.Module) for value in inspect.getclosurevars(hook).nonlocals.values())


def _object_effects(path: str, twin: object, original: object) -> Iterator[Effect]:
    """What the call left in the attributes of an object that a module holds."""
    if twin is original or type(twin) is not type(original):
        return
    held = vars(original)
    for name, value in vars(twin).items():
        copy = copy_value(value)
        settings = copy is not ABSENT and (is_plain(value) or isinstance(value, CONTAINERS))
        if settings and (name not in held or not is_equivalent(held[name], copy)):
            yield Effect(f"{path}.{name}", held, name, copy)


@dataclass(slots=True, eq=False)
class _GuardCollector:
    """Guards of what was read, each once.

    Attributes:
        reads, submodules, attributes, hooks: as `Guards` has them.
        objects: those of modules, that are none themselves: their paths, those of the twin, those of the module.
    """

    reads: list[ValueGuard] = field(default_factory=list)
    submodules: list[TableGuard] = field(default_factory=list)
    attributes: list[TableGuard] = field(default_factory=list)
    hooks: list[TableGuard] = field(default_factory=list)
    objects: list[tuple[str, Any, object]] = field(default_factory=list)
    _known: set[tuple[int, str]] = field(default_factory=set)

    def module(self, part: _WatchedModule, names: Sequence[str]) -> None:
        """Guards of the attributes of a module that were read."""
        path, module = part.path, part.original
        held, children = vars(module), module._modules
        if "_modules" in names:
            self.submodules.append(TableGuard(path, "submodules", children))
        else:
            read = [name for name in names if name not in held and name in children]
            if read:
                self.submodules.append(TableGuard(path, "submodules", children, read))
        looked_up = []
        for name in names:
            if name in held:
                if name != "_modules":
                    twin = vars(part.fake).get(name)
                    self._value(f"{path}.{name}", held, name, None if isinstance(twin, ContainerStandIn) else twin)
            elif name in module._buffers:
                if module._buffers[name] is None:
                    self._value(f"{path}.{name}", module._buffers, name)
            elif name not in children and name not in module._parameters:
                if name not in _METHODS and not isinstance(getattr(type(module), name, None), property):
                    looked_up.append(name)  # an attribute of the module would hide that of its class
                self._of_class(type(module), name)
        if looked_up:
            self.attributes.append(TableGuard(path, "attributes", held, looked_up))

    def _of_class(self, kind: type, name: str) -> None:
        owner = next((one for one in kind.__mro__ if name in vars(one)), None)
        known = owner is None or (id(owner), name) in self._known
        if owner is not None and not known and owner.__module__.split(".")[0] not in FOREIGN:
            self._known.add((id(owner), name))
            self.reads.append(ValueGuard(f"{owner.__name__}.{name}", vars(owner), name))

    def _value(self, path: str, table: Mapping[str, Any], name: str, twin: Any = None, depth: int = 0) -> None:
        if (id(table), name) not in self._known:
            self._known.add((id(table), name))
            self.reads.append(ValueGuard(path, table, name))
            self._inside(path, table[name], twin, depth)

    def _inside(self, path: str, value: Any, twin: Any, depth: int) -> None:
        """Guards of the attributes of an object, be it in a container; `twin` is what the twin has there."""
        if depth == _DEPTH or copy_value(value) is not ABSENT or isinstance(value, Tensor):
            return
        if isinstance(value, dict):
            for key, one in value.items():
                other = twin.get(key) if isinstance(twin, dict) else None
                self._inside(f"{path}[{key!r}]", one, other, depth + 1)
        elif isinstance(value, (list, tuple)):
            others = twin if isinstance(twin, (list, tuple)) and len(twin) == len(value) else [None] * len(value)
            for place, (one, other) in enumerate(zip(value, others, strict=True)):
                self._inside(f"{path}[{place}]", one, other, depth + 1)
        elif is_object(value) and (id(value), "") not in self._known:
            self._known.add((id(value), ""))
            self.objects.append((path, twin, value))
            self.attributes.append(TableGuard(path, "attributes", vars(value), keys_only=True))
            for name in list(vars(value)):
                inner = getattr(twin, "__dict__", {}).get(name)
                self._value(f"{path}.{name}", vars(value), name, inner, depth + 1)
