"""The private torch names that the backend of torch.compile uses, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import fx, nn

# Its folder distinguishes Dynamo's own frames from those of users.
from torch._dynamo import eval_frame

# The type of a compiled module.
from torch._dynamo.eval_frame import OptimizedModule

# The name prefix of code after a graph break.
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

# Nested containers of tensors, as torch.export flattens them.
from torch.utils import _pytree as pytree

__all__ = ["ModuleCall", "break_reason", "leave_dynamo", "module_call", "output_values", "pytree"]

_DYNAMO = str(Path(eval_frame.__file__).parent)
# Runs hooks and `forward`; its nested function is named after it.
_MODULE = nn.Module._call_impl.__code__


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a compiled module that is in progress.

    Attributes:
        module: the module.
        args: the positional arguments.
        kwargs: the keyword arguments.
        part: the part of the call in the graph: `"forward"`; `"hook"`, one of its hooks; or `"all"`, both. For a module
            of torch, Dynamo makes one graph together with its hooks.
        wrapper: torch.compile's object around the module; None after `module.compile(...)`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: Literal["forward", "hook", "all"]
    wrapper: nn.Module | None


def module_call() -> ModuleCall | None:
    """Return the module call that runs the graph which calls this function, found on the stack.

    None unless Dynamo compiled, from its start, the call, or a hook, of the module given to torch.compile; for instance
    if it compiled a function around the module, a submodule, or the code after a graph break.
    """
    users = [frame for frame in _outward(inspect.currentframe()) if not _is_dynamo(frame)]
    # The backend's own frames.
    while users and users[0].f_globals.get("__package__") == __package__:
        users.pop(0)
    # Dynamo's generated code; it has no frame if Dynamo compiled torch's own `_call_impl`.
    compiled = users.pop(0) if users and not _calls_forward(users[0]) else None
    if not users or not _calls_forward(users[0]):
        return None
    call = users[0].f_locals
    module: nn.Module = call["self"]
    if compiled is None:
        if not isinstance(module, OptimizedModule):
            return None
        return ModuleCall(module._orig_mod, tuple(call["args"]), dict(call["kwargs"]), "all", module)
    resumed = compiled.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    if resumed or isinstance(module, OptimizedModule) or not _is_target(users[0]):
        return None
    part: Literal["forward", "hook"] = "forward" if _runs(compiled, module.forward) else "hook"
    return ModuleCall(module, tuple(call["args"]), dict(call["kwargs"]), part, _wrapper(module, users))


def _runs(frame: FrameType, function: Any) -> bool:
    """Return True if a frame runs Dynamo's code for a function: different code with the same place and name."""
    code, original = frame.f_code, getattr(function, "__code__", None)
    return original is not None and (code.co_filename, code.co_firstlineno, code.co_name) == (
        original.co_filename,
        original.co_firstlineno,
        original.co_name,
    )


def _wrapper(module: nn.Module, frames: list[FrameType]) -> nn.Module | None:
    callers = (frame.f_locals["self"] for frame in frames if _calls_forward(frame))
    return next(
        (caller for caller in callers if isinstance(caller, OptimizedModule) and caller._orig_mod is module), None
    )


def leave_dynamo(call: ModuleCall) -> None:
    """Call the module directly from now on, bypassing Dynamo."""
    call.module.forward = torch.compiler.disable(call.module.forward, reason="autoshard runs this module")
    call.module._compiled_call_impl = None
    if call.wrapper is not None:
        call.wrapper.forward = call.module.__call__


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_dynamo(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_DYNAMO)


def _calls_forward(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == _MODULE.co_filename and code.co_qualname.startswith(_MODULE.co_qualname)


def _is_target(frame: FrameType) -> bool:
    """Return True if Dynamo calls the module whose call has this frame."""
    module = frame.f_locals["self"]
    for caller in _outward(frame):
        # A module call has several frames of torch's `Module`.
        if caller.f_code.co_filename != _MODULE.co_filename or caller.f_locals.get("self") is not module:
            return _is_dynamo(caller)
    return False


def break_reason(graph: fx.GraphModule) -> tuple[str, str] | None:
    """Return why Dynamo ended this graph before its function returned, and the user's line; None if it did not."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    place = reason.user_stack[-1] if reason.user_stack else None
    where = "" if place is None else f"{place.filename}:{place.lineno}, in {place.name}"
    return str(reason.reason).strip(), where


def output_values(graph: fx.GraphModule) -> list[Any]:
    """Return fake tensors, or other values, for the outputs of Dynamo's graph."""
    output = next(iter(graph.graph.find_nodes(op="output")))
    return [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in output.args[0]]
