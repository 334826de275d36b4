"""Methods of a parallelised module, besides its `forward`, that run as separate calls.

A `MethodCaller` has the module as its only child, and its `forward` calls the method. A `Runtime` runs the caller:
every kind of call is captured and planned with the placements of the parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.names import suggestion
from autoshard.options.target import Target
from autoshard.runtime.module_runtime import Runtime, runtime_of
from autoshard.runtime.program_maker import CallPlanner, ProgramMaker
from autoshard.specs.axes import MeshShape

PlannerMaker = Callable[[nn.Module, MeshShape, Target], CallPlanner]

# The attribute of a caller that holds the module.
_CHILD = "module"


class MethodCaller(nn.Module):
    """A module whose `forward`, defined in a subclass, calls a method of its only child."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.add_module(_CHILD, module)


def register_method(module: nn.Module, path: str, make_planner: PlannerMaker) -> None:
    """Replace a method of a parallelised module, or of a submodule, by its programs.

    Args:
        module, path: as for `autoshard.register_forward_method`.
        make_planner: makes the planner of the calls of a module on a mesh for a target.

    Raises:
        InputError: as for `autoshard.register_forward_method`.
    """
    runtime = runtime_of(module, "register_forward_method")
    owner, name = _find_method(module, path)
    if any(owner is known and name == known_name for known, known_name, _ in runtime.methods_before):
        return
    caller = _caller(module, path, getattr(owner, name))
    runtime.replace_method(owner, name, _MethodRuntime(runtime, caller, path, make_planner))


def _find_method(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the module or submodule that has the method, and the method's name there."""
    owner_path, _, name = path.rpartition(".")
    parts = dict(module.named_modules(remove_duplicate=False))
    if owner_path not in parts:
        raise InputError(
            f"{path!r}: {type(module).__name__} has no submodule {owner_path!r}. "
            f"{suggestion(owner_path, parts.keys() - {''})}"
        )
    owner = parts[owner_path]
    kind = type(owner)
    method = getattr(owner, name, None)
    if isinstance(method, nn.Module):
        raise InputError(f"{path!r} is a submodule: name its method, {path + '.forward'!r}.")
    # Of the methods of `nn.Module`, only `forward` computes.
    is_inherited = name != "forward" and getattr(kind, name, None) is getattr(nn.Module, name, ())
    if not callable(method) or is_inherited:
        names = {*dir(kind)} - {*dir(nn.Module)}
        methods = sorted(each for each in names if callable(getattr(kind, each, None)))
        what = "is a method of every torch.nn.Module, which runs as it is" if is_inherited else "is not a method"
        raise InputError(
            f"{path!r} {what}: pass the name of a method of {kind.__name__} that computes. {suggestion(name, methods)}"
        )
    return owner, name


def _caller(module: nn.Module, path: str, method: Callable[..., Any]) -> MethodCaller:
    """Return a module whose `forward` has the arguments of a method, and calls it."""
    owner_path, _, name = path.rpartition(".")

    def forward(self: MethodCaller, *args: Any, **kwargs: Any) -> Any:
        child: nn.Module = getattr(self, _CHILD)
        return getattr(child.get_submodule(owner_path), name)(*args, **kwargs)

    def signature() -> None:
        """Have the signature of `forward`."""

    # Inputs are named after the arguments. `__wrapped__` is used because wrappers of the bound `forward` copy
    # `__signature__`, receiver included.
    arguments = inspect.signature(method)
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    with_receiver = arguments.replace(parameters=[receiver, *arguments.parameters.values()])
    signature.__signature__ = with_receiver  # type: ignore[attr-defined]
    forward.__wrapped__ = signature  # type: ignore[attr-defined]
    # A separate class: the arguments are read from the class, and logs and errors show its name.
    kind = type(f"{type(module).__name__}.{path}", (MethodCaller,), {"forward": forward, "__module__": __name__})
    caller: MethodCaller = kind(module)
    return caller


class _MethodRuntime:
    """Runs a method of a parallelised module.

    Args:
        main: the runtime of the module.
        caller: a module that holds the module and calls the method.
        path: the path of the method.
        make_planner: makes the planner of the calls of a module on a mesh for a target.
    """

    def __init__(self, main: Runtime, caller: MethodCaller, path: str, make_planner: PlannerMaker) -> None:
        self._main = main
        self._caller = caller
        self._path = path
        self._make_planner = make_planner
        self._runtime: Runtime | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepare()(*args, **kwargs)

    @torch.compiler.disable(reason="the programs of a parallelised module are compiled one by one")
    def call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in code traced by `torch.compile`."""
        return self._prepare().call_compiled(*args, **kwargs)

    def _prepare(self) -> Runtime:
        """Return the runtime; make it at the first call."""
        # By the first call, the shares of ranks and the placements are decided.
        if self._runtime is None:
            self._runtime = self._start()
        self._caller.training = self._main.module.training
        # Local inputs are placed like inputs of `forward` with the same name.
        programs = self._runtime.programs
        programs.input_placements = self._main.programs.input_placements | programs.input_placements
        return self._runtime

    def _start(self) -> Runtime:
        main = self._main
        if main.maker.placed is None:
            raise InputError(
                f"{self._path} is called before the first call of the module, which decides how the parameters lie. "
                "Call the module first, or give autoshard.parallelize an example of such a call."
            )
        target = _method_target(main.maker.planner.requested, type(self._caller))
        maker = ProgramMaker(self._caller, main.device_mesh, self._make_planner(self._caller, main.mesh, target), None)
        maker.placed = {f"{_CHILD}.{name}": placements for name, placements in main.maker.placed.items()}
        runtime = Runtime(maker)
        runtime.programs.accumulation, runtime.programs.order = main.programs.accumulation, main.programs.order
        return runtime


def _method_target(target: Target, caller: type[nn.Module]) -> Target:
    """Return the target for the calls of a method, given the module's target.

    Dynamic sizes apply to arguments of the same name. Options for named inputs and outputs refer to `forward`, and are
    dropped.
    """
    arguments = inspect.signature(caller.forward).parameters
    hints = target.hints
    if isinstance(hints, Mapping):
        hints = {f"{_CHILD}.{glob}": value for glob, value in hints.items()}
    # The argument of `batch['x']` is `batch`.
    dynamic = {name: dims for name, dims in (target.dynamic or {}).items() if re.split(r"[.\[]", name)[0] in arguments}
    outputs = target.output_placements
    return replace(
        target,
        options=replace(target.options, unread_outputs=()),
        hints=hints,
        input_placements={},
        output_placements=outputs if isinstance(outputs, str) else None,
        dynamic=dynamic or None,
    )
