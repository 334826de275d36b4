"""The state that `forward` reads and changes: flags, numbers, submodules and hooks, tensors in Python and in buffers.

A graph has the state of the capture. State that was read becomes guards, so that the graph is not used for calls that
would run differently. Changes of state are replayed after every call, as on one device. Tensors stored in state are
extra outputs of the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from autoshard.capture._torch import FakeTensorMode, around_dynamo, attribute_patch, storage_of, without_root_buffers
from autoshard.capture.capture_errors import running_line
from autoshard.capture.python.conditions import Conditions, ModuleTensor
from autoshard.capture.python.fake_module import fake_copy, is_checked_method
from autoshard.capture.python.guards import (
    ABSENT,
    HOOKS,
    Guards,
    TableGuard,
    ValueGuard,
    copy_value,
)
from autoshard.capture.python.module_hooks import HookWatch, Key, ObservedCall
from autoshard.capture.python.mutations import Attribute, Mutation, Mutations
from autoshard.capture.python.reachable import DEPTH, FOREIGN, MODULE_STATE, Reachable, is_object
from autoshard.errors import CaptureError, InputError, warn_caller

_METHODS = frozenset(vars(nn.Module)) - {"forward"}  # which nobody sets on a module
_MOST_STATES = 4  # most graphs of one kind of call that changes the state it reads


@dataclass(frozen=True, slots=True, eq=False)
class AddedHook:
    """A hook that a call registers on a submodule, as some models do for more outputs.

    It runs with the submodule, so only when another call is captured.
    """

    module: nn.Module
    table: str
    hook: Callable[..., Any]
    with_kwargs: bool

    def apply(self) -> None:
        """Register the hook, unless it is registered."""
        if self.hook not in getattr(self.module, self.table).values():
            is_pre_hook = self.table == "_forward_pre_hooks"
            register = self.module.register_forward_pre_hook if is_pre_hook else self.module.register_forward_hook
            register(self.hook, with_kwargs=self.with_kwargs)


@dataclass(slots=True, eq=False)
class PythonState:
    """The Python state of a captured call.

    Attributes:
        guards: the state that the graph depends on.
        mutations: the changes that a call makes.
        counters: paths of numbers that the call reads and changes, and of containers that it fills.
        conditions: the values in inputs and buffers that the graph depends on.
        hooks: the hooks that a call registers.
        observed: the calls of observing hooks.
    """

    guards: Guards = field(default_factory=Guards)
    mutations: tuple[Mutation, ...] = ()
    counters: tuple[str, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    hooks: tuple[AddedHook, ...] = ()
    observed: tuple[ObservedCall, ...] = ()

    def apply_effects(self, tensors: Sequence[Tensor] = ()) -> None:
        """Apply the changes of a call that stores these tensors."""
        # All results before any change: a value may move from one object to another.
        results = [mutation.result(tensors) for mutation in self.mutations]
        for mutation, result in zip(self.mutations, results, strict=True):
            mutation.apply(result)
        for hook in self.hooks:
            hook.apply()
        for call in self.observed:
            call.run(tensors)

    def invalidating_mutations(self) -> list[Mutation]:
        """Return the mutations that make the guards fail."""
        changed = [subject for subject, _ in self.guards.changes()]
        return [
            mutation
            for mutation in self.mutations
            if any(f"the attribute {path}" in changed for path in (mutation.path, mutation.path.partition("[")[0]))
        ]


def check_invalidating_effects(known: Sequence[PythonState]) -> None:
    """Raise an `InputError` if a kind of call needs more and more graphs because it changes the state that it reads.

    Args:
        known: the states of its graphs, all different from the current state.
    """
    changing = [mutation for state in known for mutation in state.invalidating_mutations()]
    for mutation in changing:
        count = sum(each.path == mutation.path for each in changing)
        if count >= _MOST_STATES:
            raise InputError(
                f"forward reads {mutation.path} and changes it in every call ({mutation.line}), and what it computes "
                f"depends on it: each value would need a program of its own, and there are {count}. Keep the number in "
                f'a buffer (self.register_buffer("{mutation.name}", torch.zeros(()))) and change that in forward; '
                "change the attribute outside of forward, to few values; or fill a container without looking into it."
            )


@dataclass(slots=True, eq=False)
class _WatchedModule:
    """A module of the twin, and the names of its attributes that `forward` read.

    Attributes:
        path: in the twin.
        fake: the module of the twin.
        original: the user's module.
        read: names of attributes that were read, in order.
        fresh: names of attributes that were set before they were read, so that old values do not matter.
    """

    path: str
    fake: nn.Module
    original: nn.Module
    read: dict[str, None] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The user's expression for the module."""
        return f"self.{self.path}" if self.path else "self"


class StateWatch:
    """A fake twin of a module, and the record of the Python state that its `forward` reads and sets.

    Args:
        module: the user's module, whose state the guards and mutations concern.
        mode: of the fake tensors.
        counting: paths of numbers and containers replaced by stand-ins, which detect if anything depends on them.
        traced: the hooks of submodules that are part of `forward`.

    Attributes:
        twin: the fake copy.
        mutations: the changes of objects.
        hooks: the hooks of submodules.
        running: True while `forward` runs.
        traced_parameters: replaces tensors of the user's module by those of the twin.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: FakeTensorMode,
        counting: Sequence[str] = (),
        traced: Collection[Key] = (),
    ) -> None:
        reachable, originals = Reachable(module), dict(module.named_modules())
        self.mode = mode
        self.twin = fake_copy(module, mode, reachable)
        # By identity, since every attribute access looks up its module.
        self._parts = {
            id(part): _WatchedModule(path, part, originals[path])
            for path, part in self.twin.named_modules()
            if path in originals
        }
        self.running = False
        self._counting = counting
        self._hooked: set[tuple[int, str, int]] = set()
        self._added: tuple[AddedHook, ...] = ()
        modules = {id(part.fake): part.original for part in self._parts.values()}
        self.mutations = Mutations(reachable, modules, counting)
        parts = [(part.path, part.fake, part.original) for part in self._parts.values() if part.path]
        self.hooks = HookWatch(parts, reachable, self.mutations, traced)
        self._observed: tuple[ObservedCall, ...] = ()
        self.traced_parameters = TracedParameters(self._parts.values())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the export, entered last, so that only `forward` is watched."""
        reader, setter = self._reader(), self._setter(nn.Module.__setattr__)
        patches = contextlib.ExitStack()

        def patch() -> None:
            patches.enter_context(attribute_patch(nn.Module, "__getattribute__", reader))
            patches.enter_context(attribute_patch(nn.Module, "__setattr__", setter))

        with around_dynamo(patches.close, patch), patches:  # Dynamo does not support the watch of attributes
            patch()
            yield

    def begin(self) -> None:
        """Begin to record a call."""
        self.running = True
        self.hooks.begin()
        self._hooked = {(id(part), table, key) for part, table, key, _ in self._hooks()}

    def held_tensors(self) -> Iterator[tuple[Tensor, ModuleTensor]]:
        """Yield the buffers of the twin, and tensors in its attributes, with those of the user's module."""
        for part in self._parts.values():
            tables = (part.fake._buffers, part.original._buffers), (vars(part.fake), vars(part.original))
            for fakes, originals in tables:
                for name, fake in fakes.items():
                    if isinstance(fake, Tensor) and isinstance(originals.get(name), Tensor):
                        yield fake, ModuleTensor(f"{part.text}.{name}", originals, name)

    def _hooks(self) -> Iterator[tuple[_WatchedModule, str, int, Callable[..., Any]]]:
        """Yield the hooks of submodules; the hooks of the root run around the program."""
        for part in self._parts.values():
            for table in ("_forward_hooks", "_forward_pre_hooks") if part.fake is not self.twin else ():
                for key, hook in vars(part.fake)[table].items():
                    yield part, table, key, hook

    def end(self) -> None:
        """End the record of a call."""
        self.running = self.hooks.running = False
        self._added = tuple(
            AddedHook(part.original, table, hook, key in vars(part.fake)[f"{table}_with_kwargs"])
            for part, table, key, hook in self._hooks()
            if (id(part), table, key) not in self._hooked and not _holds_module(hook)
        )

    def end_hooks(self) -> None:
        """Add the tensors of observing hooks to the stored tensors, after the other changes."""
        self._observed = tuple(self.hooks.end())

    def _reader(self) -> Callable[[nn.Module, str], Any]:
        # Local variables, since this runs at every attribute access of any module.
        plain, parts = object.__getattribute__, self._parts

        def read(module: nn.Module, name: str) -> Any:
            if self.running:
                part = parts.get(id(module))
                if part is not None:
                    part.read[name] = None
            return plain(module, name)

        return read

    def _setter(self, plain: Callable[[nn.Module, str, Any], None]) -> Callable[[nn.Module, str, Any], None]:
        parts, lines = self._parts, self.mutations.lines

        def write(module: nn.Module, name: str, value: Any) -> None:
            part = parts.get(id(module)) if self.running else None
            if part is not None:
                # Nothing has depended on the old value.
                if name not in part.read:
                    part.fresh.add(name)
                lines[id(part.original), name] = running_line()
            plain(module, name, value)

        return write

    def state(self) -> PythonState:
        """Return the state that the export read and changed."""
        for path, line in self.mutations.unknown_sizes.items():
            warn_caller(
                f"{line} sets {path} to a size that calls may change: the parallelised module does not. Return the "
                "size, or leave it out of dynamic.",
            )
        # Guards of the user's modules for the attributes that were read of the copy.
        guards = _GuardCollector()
        for part in self._parts.values():
            is_root = part.fake is self.twin
            names = [
                name
                for name in part.read
                if name not in part.fresh
                # Training flags are part of a call's signature, parameters and buffers are inputs of the graph.
                and (name not in MODULE_STATE or name == "_modules")
            ]
            guards.module(part, [name for name in names if not (is_root and name == "forward")])
            if "_forward_hooks" in part.read and not is_root:  # the root's hooks run around the program
                tables = vars(part.original)
                guards.hooks += [TableGuard(part.text, "hooks", tables[name]) for name in HOOKS]
        # Only these numbers are worth a second export, which checks if anything depends on them.
        numbers = {read.path for read in guards.reads if type(read.value) in (int, float)}
        mutations = tuple(self.mutations.changes)
        return PythonState(
            Guards(
                [read for read in guards.reads if read.path not in self._counting],
                guards.submodules,
                guards.attributes,
                guards.hooks,
                [mutation for mutation in mutations if not mutation.is_write_only],
            ),
            mutations,
            tuple(self.mutations.counters(numbers)),
            hooks=self._added,
            observed=self._observed,
        )


def _holds_module(hook: Callable[..., Any]) -> bool:
    """Return True if a hook may refer to modules of the twin: all but functions without modules in their closure."""
    # A method is bound to a module of the twin, and would run on fake tensors.
    if not isinstance(hook, FunctionType):
        return True
    return any(isinstance(value, nn.Module) for value in inspect.getclosurevars(hook).nonlocals.values())


@dataclass(slots=True, eq=False)
class _GuardCollector:
    """Distinct guards of the state that was read: `reads`, `submodules`, `attributes` and `hooks` of `Guards`."""

    reads: list[ValueGuard] = field(default_factory=list)
    submodules: list[TableGuard] = field(default_factory=list)
    attributes: list[TableGuard] = field(default_factory=list)
    hooks: list[TableGuard] = field(default_factory=list)
    _known: set[tuple[int, str]] = field(default_factory=set)

    def module(self, part: _WatchedModule, names: Sequence[str]) -> None:
        """Add guards of the attributes of a module that were read."""
        path, module = part.text, part.original
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
                    self._value(f"{path}.{name}", held, name)
                if is_checked_method(held[name]):
                    self._of_class(type(module), name)
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
        # The class in which Python finds the name, where a later assignment would change it for all instances.
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        known = owner is None or (id(owner), name) in self._known
        if owner is not None and not known and owner.__module__.split(".")[0] not in FOREIGN:
            self._known.add((id(owner), name))
            self.reads.append(ValueGuard(f"{owner.__name__}.{name}", vars(owner), name))

    def _value(self, path: str, table: Mapping[str, Any], name: str, depth: int = 0) -> None:
        if (id(table), name) not in self._known:
            self._known.add((id(table), name))
            self.reads.append(ValueGuard(path, table, name))
            self._inside(path, table[name], depth)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        """Add guards of the attributes of an object, or of objects in a container."""
        if depth == DEPTH or copy_value(value) is not ABSENT or isinstance(value, Tensor):
            return
        if isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._inside(f"{path}[{key!r}]", item, depth + 1)
        elif is_object(value) and (id(value), "") not in self._known:
            self._known.add((id(value), ""))
            self.attributes.append(TableGuard(path, "attributes", vars(value), keys_only=True))
            for name in list(vars(value)):
                self._value(f"{path}.{name}", vars(value), name, depth + 1)


class TracedParameters(TorchFunctionMode):
    """Mode in which functions of torch use the traced parameter or buffer instead of the user's.

    Code may find a parameter in a global variable, a list or a closure. The capture runs a copy of the module, in which
    tensors are fake; the real parameter would be a constant of the graph, without a gradient.

    Args:
        parts: the modules of the copy that is captured, with those of the user.
    """

    def __init__(self, parts: Iterable[_WatchedModule]) -> None:
        super().__init__()
        self._tensors: dict[int, tuple[nn.Module, str]] = {}
        self._whole: dict[int, str] = {}  # names by storage, of tensors that can have views
        for part in parts:
            for name, tensor in (*part.original._parameters.items(), *part.original._buffers.items()):
                if tensor is not None:
                    self._tensors[id(tensor)] = part.fake, name
                    if not isinstance(tensor, DTensor):
                        self._whole[storage_of(tensor)] = f"{part.path}.{name}" if part.path else name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(
            *map(self._traced_value, args),
            **{name: self._traced_value(value) for name, value in (kwargs or {}).items()},
        )

    def _traced_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            place = self._tensors.get(id(value))
            return value if place is None else getattr(*place)
        # Functions of torch take no other containers of tensors.
        return type(value)(map(self._traced_value, value)) if type(value) in (list, tuple) else value

    def check_constant(self, constant: Tensor, line: str) -> None:
        """Raise a `CaptureError` if a constant of the graph is a view of a parameter or buffer."""
        name = self._whole.get(storage_of(constant))
        if name is not None:
            raise CaptureError(
                f"{line} reads a view of {name} that was made outside of forward: a parallelised module has another "
                f"{name} in its place. Make the view in forward."
            )


# The start of torch.export's warning of a lost assignment.
_ASSIGNMENT_WARNING = "The tensor attribute"


@dataclass(frozen=True, slots=True)
class SetBuffer:
    """A buffer that `forward` set to another tensor.

    Attributes:
        name: of the buffer.
        fault: the reason why the module cannot hold the new tensor; None if it can.
    """

    name: str
    fault: str | None


class AssignedTensors:
    """Watch of a call that returns, besides its output, the tensors that it stores in Python.

    Mixtures of experts store their balancing loss in an attribute, and recurrent networks their state; running
    statistics are buffers. torch.export undoes assignments to attributes, and supports those to buffers only in the
    root module.

    Args:
        module: the module, before its call.
        mutations: records which tensors the call stores in attributes and other objects.
        flags: returns, after the call, flags that are the last outputs.
        leave_more: called after the record of stored tensors, to add to it.

    Attributes:
        buffers: the buffers that the call set to other tensors, which are outputs after those of `attributes`.
    """

    def __init__(
        self,
        module: nn.Module,
        mutations: Mutations,
        flags: Callable[[], Sequence[torch.Tensor]] = tuple,
        leave_more: Callable[[], None] = lambda: None,
    ) -> None:
        self._module = module
        self._mutations = mutations
        self._leave_more = leave_more
        self._flags = flags
        self.buffers: tuple[SetBuffer, ...] = ()
        self._buffers_before: dict[str, torch.Tensor | None] = {}
        self._lines: dict[tuple[int, str], str] = {}  # the last line that set a buffer of a module

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """The tensors that the call stores in attributes, containers and variables."""
        return tuple(Attribute(path, value.requires_grad) for path, value in self._mutations.kept)

    def begin(self) -> None:
        """Record the buffers before a call."""
        # Not in `__init__`: at the start of the call, torch.export has replaced the module's buffers.
        self._buffers_before = dict(self._named_buffers())
        self._mutations.begin()

    def _note_line(self, part: nn.Module, name: str, buffer: object) -> None:
        self._lines[id(part), name] = running_line()

    def end(self, output: Any) -> Any:
        """Return the output, the values of attributes and buffers, and flags; only the output without any."""
        self._mutations.end()
        self._leave_more()
        buffers = dict(self._new_buffers())
        self.buffers = tuple(buffers)
        more = tuple(value for _, value in self._mutations.kept), tuple(buffers.values()), tuple(self._flags())
        return (output, *more) if any(more) else output

    def _new_buffers(self) -> Iterator[tuple[SetBuffer, torch.Tensor]]:
        """Yield the buffers that were set to other tensors, and these tensors.

        Raises:
            CaptureError: no graph can hold the assignment.
        """
        now = dict(self._named_buffers())
        for name in self._buffers_before | now:
            old, new = self._buffers_before.get(name), now.get(name)
            # In-place changes keep the tensor; the graph has them as operators.
            if new is old:
                continue
            path, _, last = name.rpartition(".")
            part = self._module.get_submodule(path)
            line = self._lines.get((id(part), last), f"forward of {type(self._module).__name__}")
            if new is None:
                raise CaptureError(
                    f"{line} sets the buffer {name} to None or deletes it: a parallelised module keeps its buffers. "
                    f"Fill it with zeros (self.{last}.zero_()), or keep a flag in a plain attribute."
                )
            aliases = [alias for alias, buffer in self._buffers_before.items() if buffer is old and alias != name]
            if old is not None and aliases:
                raise CaptureError(
                    f"{line} sets the buffer {name}, which is registered as {', '.join(aliases)} too: these would be "
                    f"different tensors from then on. Change it in place (self.{last}.copy_(new)), or register two "
                    "tensors."
                )
            if new.requires_grad:
                raise CaptureError(
                    f"{line} sets the buffer {name} to a tensor that requires a gradient, which would reach from every "
                    f"call into those before. Set it to the detached tensor: self.{last} = new.detach()."
                )
            fits = old is not None and old.dtype == new.dtype and _shape(old) == _shape(new)
            fault = (
                f"{line} sets the buffer {name}, which {_describe_tensor(old)}, to a tensor that "
                f"{_describe_tensor(new)}: a parallelised module keeps its buffers, with their "
                "shapes and dtypes. Register it as it will be, keep "
                f"what changes in a plain attribute (self.{last} = ... without register_buffer), or return it."
            )
            # Only the graph tells if a fault is an error: a cache of constants may be rebuilt.
            yield SetBuffer(name, None if fits else fault), new

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of a call of torch.export that drops its warnings of lost assignments, since none is lost."""
        with (
            register_module_buffer_registration_hook(self._note_line),
            warnings.catch_warnings(record=True) as raised,
            without_root_buffers(),
        ):
            warnings.filterwarnings("always", _ASSIGNMENT_WARNING)
            yield
        for warning in raised:
            if not str(warning.message).startswith(_ASSIGNMENT_WARNING):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def _named_buffers(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield all buffers by path, including those that are None, which torch's `named_buffers` omits."""
        for path, part in self._module.named_modules():
            for name, value in part._buffers.items():
                yield (f"{path}.{name}" if path else name), value


def _shape(tensor: torch.Tensor) -> tuple[str, ...]:
    # Symbolic sizes as strings: comparing symbols would add a condition on sizes to the graph.
    return tuple(map(str, tensor.shape))


def _describe_tensor(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "was not there"
    return f"is of shape ({', '.join(_shape(tensor))}) and {tensor.dtype}"
