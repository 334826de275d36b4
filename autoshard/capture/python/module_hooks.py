"""Forward hooks of submodules that only observe: they run after every call, on tensors that the graph returns for them.

A hook is tried first, on separate tensors, and its changes are undone. If it returns nothing and changes neither
tensors nor objects that the code of `forward` can reach, it only observes, and its Python is kept out of the graph. Any
other hook is part of `forward`, and is traced.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard.capture._torch import (
    FakeTensor,
    outside_modes,
    pytree,
    transforms_active,
    version_of,
    without_new_symbols,
)
from autoshard.capture.capture_errors import code_line
from autoshard.capture.python.mutations import Mutations, build_value
from autoshard.capture.python.reachable import Reachable, TrackedObject
from autoshard.errors import CaptureError, InputError

Key = tuple[str, str, int]
"""The path of a submodule, the name of a table of hooks, and the key of a hook in it."""

_attributes: Any = Tensor
_ON_GRADIENTS = frozenset(
    {
        *(Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, Tensor.backward, torch.autograd.grad),
        *(_attributes.requires_grad.__set__, _attributes.grad.__set__, _attributes.data.__set__),
    }
)
"""Functions of torch that act on gradients, or are hidden from autograd."""


class HooksInForward(BaseException):  # no code of a model may catch it
    """Hooks that seemed to only observe, but have to be traced.

    Attributes:
        keys: of the hooks.
        leaks: texts of hooks, and tensors that their trials stored in objects that were not found.
    """

    def __init__(self, keys: Collection[Key], leaks: Sequence[tuple[str, weakref.ref[Tensor]]]) -> None:
        super().__init__()
        self.keys, self.leaks = frozenset(keys), tuple(leaks)

    def check_leaks(self) -> None:
        """Raise a `CaptureError` if a trial stored a tensor in an object that outlives the call."""
        if any(tensor() is not None for _, tensor in self.leaks):
            gc.collect()
        text = next((text for text, tensor in self.leaks if tensor() is not None), None)
        if text is not None:
            raise CaptureError(
                f"{text} keeps tensors where no capture finds them: too deep in an object, or in one of another "
                "library. There is a tensor without numbers in it now: clear it. Keep tensors in a dict, a list or an "
                "attribute that the hook names, or set the hook on the parallelised module itself."
            )


@dataclass(frozen=True, slots=True, eq=False)
class ObservedCall:
    """One call of an observing hook, after each call of the module.

    Attributes:
        text: the hook, as in errors.
        module: the user's submodule.
        hook: the user's hook.
        arguments: its arguments after the module, with slots for tensors.
        grad: True if it runs with gradients enabled.
    """

    text: str
    module: nn.Module
    hook: Callable[..., Any]
    arguments: Any
    grad: bool

    def run(self, tensors: Sequence[Tensor]) -> None:
        """Call the hook with the tensors of a call.

        Raises:
            InputError: it does more than observe, depending on data.
        """
        arguments = build_value(self.arguments, {}, tensors)
        seen = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [version_of(tensor) for tensor in seen]
        with torch.set_grad_enabled(self.grad):
            result = self.hook(self.module, *arguments)
        if result is not None or any(map(int.__ne__, versions, map(version_of, seen))):
            raise InputError(
                f"{self.text} asks for the numbers in a tensor, and changes what the module computes depending on "
                "them: it runs behind the program of the whole module, which is too late. Choose by torch.where, "
                "without asking for numbers."
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Spot:
    """A hook of a submodule: the user's and the twin's."""

    key: Key
    path: str
    module: nn.Module
    hook: Callable[..., Any]
    traced: Callable[..., Any]

    @property
    def text(self) -> str:
        """The hook, as in errors."""
        code = getattr(_function_of(self.hook)[0], "__code__", None)
        kind = "forward pre-hook" if self.key[1] == "_forward_pre_hooks" else "forward hook"
        name = getattr(self.hook, "__qualname__", type(self.hook).__name__)
        place = "" if code is None else f" ({code_line(code.co_filename, code.co_firstlineno)})"
        return f"the {kind} {name} of {self.path}{place}"


@dataclass(slots=True, eq=False)
class _Seen:
    """A call of an observing hook, while `forward` runs."""

    spot: _Spot
    arguments: tuple[Any, ...]
    grad: bool
    changed: list[TrackedObject]
    tensors: list[Tensor] = field(init=False)
    versions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Tensor)]
        self.versions = list(map(version_of, self.tensors))

    def is_stale(self) -> bool:
        """Return True if a tensor was changed in place since, which the hook would see after `forward`."""
        return self.versions != list(map(version_of, self.tensors))


class HookWatch:
    """The hooks of a twin's submodules, while its `forward` is exported.

    Args:
        parts: paths, modules of the twin, and the user's modules.
        reachable: the objects that `forward` and the hooks can reach.
        mutations: the changes of objects by the call.
        traced: the hooks that are part of `forward`.

    Attributes:
        pause_watches: returns a context that pauses watches and tracing.
        running: True while `forward` runs.
    """

    def __init__(
        self,
        parts: Iterable[tuple[str, nn.Module, nn.Module]],
        reachable: Reachable,
        mutations: Mutations,
        traced: Collection[Key],
    ) -> None:
        self._reachable, self._mutations, self.traced = reachable, mutations, traced
        self.pause_watches: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.running = False
        self._seen: list[_Seen] = []
        self._in_forward: dict[Key, _Spot] = {}
        self._leaks: list[tuple[_Spot, weakref.ref[Tensor]]] = []
        for path, fake, original in parts:
            for table in ("_forward_pre_hooks", "_forward_hooks"):
                hooks, originals = vars(fake)[table], vars(original)[table]
                for key, hook in list(hooks.items()):
                    if key in originals:
                        spot = _Spot((path, table, key), f"self.{path}", original, originals[key], hook)
                        hooks[key] = functools.partial(self._call, spot)

    def begin(self) -> None:
        """Begin to record a call."""
        self.running = True
        self._seen, self._in_forward, self._leaks = [], {}, []

    def _call(self, spot: _Spot, module: nn.Module, *arguments: Any) -> Any:
        """Run a hook as part of `forward`, or record its call if it only observes."""
        if not self.running or torch.compiler.is_dynamo_compiling():
            return spot.traced(module, *arguments)
        changed = None if spot.key in self.traced or transforms_active() else self._try(spot, module, arguments)
        if changed is None:
            self._in_forward[spot.key] = spot
            return spot.traced(module, *arguments)
        self._seen.append(_Seen(spot, _read_arguments(spot.hook, arguments), torch.is_grad_enabled(), changed))
        return None

    def _try(self, spot: _Spot, module: nn.Module, arguments: tuple[Any, ...]) -> list[TrackedObject] | None:
        """Run a hook hidden from the export, undo its changes, and return these; None if it does more than observe."""
        leaves = pytree.tree_leaves(arguments)
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if any(isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)) for leaf in leaves):
            return None
        trial = _Trial()
        with contextlib.ExitStack() as stack:
            changed = stack.enter_context(self._reachable.undoing())
            stack.enter_context(self.pause_watches())
            stack.enter_context(outside_modes())
            if fakes:
                stack.enter_context(fakes[0].fake_mode)
                stack.enter_context(without_new_symbols(fakes[0].fake_mode))
            only_looks = trial.run(spot, module, arguments)
        self._leaks += [(spot, made) for made in trial.made if made() is not None]
        in_forward = {id(place) for place in self._reachable.places[: self._reachable.forward_places]}
        return changed if only_looks and not any(id(place) in in_forward for place in changed) else None

    def check(self) -> None:
        """Raise `HooksInForward` if a seemingly observing hook was part of `forward`, or stored a tensor."""
        changed = {id(mutation.place.original) for mutation in self._mutations.changes}
        keys = {spot.key for spot, _ in self._leaks}
        for seen in self._seen:
            if seen.is_stale() or (changed and not changed.isdisjoint(self._reach(seen.spot))):
                keys.add(seen.spot.key)
        read = {number for spot in self._in_forward.values() for number in self._reach(spot)} if self._seen else set()
        keys |= {seen.spot.key for seen in self._seen if any(id(place.original) in read for place in seen.changed)}
        if keys - set(self.traced):
            raise HooksInForward(keys, [(spot.text, made) for spot, made in self._leaks])

    def _reach(self, spot: _Spot) -> set[int]:
        """Return the objects that a hook can read, by identity."""
        reachable = Reachable(spot.module, hooks=(spot.hook,), alone=True)
        return {id(place.original) for place in reachable.places}

    def end(self) -> list[ObservedCall]:
        """Return the calls of observing hooks, whose tensors are outputs after those of mutations."""
        self.check()
        return [
            ObservedCall(
                seen.spot.text,
                seen.spot.module,
                seen.spot.hook,
                self._mutations.tree(f"{seen.spot.path}.{seen.spot.key[1].strip('_')}", seen.arguments, seen.spot.text),
                seen.grad,
            )
            for seen in self._seen
        ]


class _GradientCodeError(Exception):
    """A hook acts on gradients."""


class _Trial(TorchFunctionMode):
    """A run of a hook on separate tensors.

    Attributes:
        made: the tensors that the hook took or made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self._own: dict[int, Tensor] = {}
        self._read: dict[int, tuple[Tensor, int]] = {}

    def run(self, spot: _Spot, module: nn.Module, arguments: tuple[Any, ...]) -> bool:
        """Run a hook, and return True if it only observes."""
        own = pytree.tree_map_only(Tensor, self._copy, arguments)
        given = [(tensor, version_of(tensor)) for tensor in self._own.values()]
        try:
            with self:
                result = spot.traced(module, *own)
            # Computation with parameters has to be part of the program, which has them in shards.
            only_looks = result is None and not any(isinstance(tensor, FakeTensor) for tensor, _ in self._reads())
        except _GradientCodeError:
            only_looks = False
        except Exception:
            # It reads values, or fails on one device, too: then the run on real tensors raises its error.
            only_looks = _returns_nothing(spot.hook)
        changed = any(version_of(tensor) != version for tensor, version in (*given, *self._reads()))
        self.made = list(map(weakref.ref, self._own.values()))
        self._own, self._read = {}, {}
        return only_looks and not changed

    def _reads(self) -> list[tuple[Tensor, int]]:
        return list(self._read.values())

    def _copy(self, tensor: Tensor) -> Tensor:
        with torch.enable_grad():
            # Not a leaf, which autograd would not let the hook change in place.
            copy = torch.empty_like(tensor, requires_grad=False).requires_grad_(tensor.requires_grad).view_as(tensor)
        self._own[id(copy)] = copy
        return copy

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ON_GRADIENTS:
            raise _GradientCodeError
        for leaf in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor) and id(leaf) not in self._own:
                self._read.setdefault(id(leaf), (leaf, version_of(leaf)))
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in self._read:
                self._own[id(leaf)] = leaf
        return result


def _function_of(hook: Any) -> tuple[Any, int]:
    """Return the function of a hook, and the number of arguments bound before the module; -1 if unknown."""
    if isinstance(hook, types.MethodType):
        return hook.__func__, 1
    if isinstance(hook, functools.partial):
        return _function_of(hook.func)[0], -1
    if isinstance(hook, types.FunctionType):
        return hook, 0
    return getattr(type(hook), "__call__", None), 1  # noqa: B004


def _returns_nothing(hook: Any) -> bool:
    """Return True if no line of a hook returns a value."""
    function, _ = _function_of(hook)
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or hasattr(function, "__wrapped__"):
        return False
    steps = list(dis.get_instructions(code))
    returned = [step for step in steps if step.opname == "RETURN_CONST"]
    for before, step in itertools.pairwise(steps):
        if step.opname == "RETURN_VALUE":
            if before.opname != "LOAD_CONST" or step.is_jump_target:
                return False
            returned.append(before)
    return all(step.argval is None for step in returned)


def _read_arguments(hook: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, with None for those that the code of the hook never reads."""
    function, bound = _function_of(hook)
    code = getattr(function, "__code__", None)
    if bound < 0 or not isinstance(code, types.CodeType) or hasattr(function, "__wrapped__"):
        return arguments
    names = code.co_varnames[bound + 1 : code.co_argcount]
    if "locals" in code.co_names or len(names) < len(arguments):
        return arguments
    # An instruction of newer Python releases may load two variables.
    loaded = {name for step in dis.get_instructions(code) for name in _names(step.argval) if "LOAD" in step.opname}
    loaded |= set(code.co_cellvars)
    return tuple(value if name in loaded else None for name, value in zip(names, arguments, strict=False))


def _names(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()
