"""The private torch names that the doors use, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import fx, nn
from torch._dynamo import eval_frame  # its folder tells Dynamo's own frames from those of users
from torch._dynamo.eval_frame import OptimizedModule  # what torch.compile makes of a module
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX  # names what follows a graph break
from torch.utils import _pytree as pytree  # nested containers of tensors, as torch.export sees them

__all__ = ["ModuleCall", "break_reason", "leave_dynamo", "module_call", "output_values", "pytree"]

_DYNAMO = str(Path(eval_frame.__file__).parent)
_MODULE = nn.Module._call_impl.__code__  # runs hooks and `forward`; its nested function is named after it


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a compiled module that is under way.

    Attributes:
        module: the module.
        args: what it was called with.
        kwargs: likewise.
        part: which part of the call the graph is: `"forward"`; `"hook"`, one of its hooks; or `"all"`, both. Of a
            module of torch's own, Dynamo makes one graph with its hooks.
        wrapper: torch.compile's object around the module; None after `module.compile(...)`.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    part: Literal["forward", "hook", "all"]
    wrapper: nn.Module | None


def module_call() -> ModuleCall | None:
    """The call that is being run by the graph that calls this function, found on the stack.

    None if it is not the module given to torch.compile whose call, or hook, Dynamo compiled from its start: but a
    function around the module, a part inside it, or what follows a graph break.
    """
    users = [frame for frame in _outward(inspect.currentframe()) if not _is_dynamo(frame)]
    while users and users[0].f_globals.get("__package__") == __package__:
        users.pop(0)
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
    """Whether a frame runs what Dynamo made of a function: other code, of the same place and name."""
    ours, code = frame.f_code, getattr(function, "__code__", None)
    places = [(one.co_filename, one.co_firstlineno, one.co_name) for one in (ours, code) if one is not None]
    return len(places) == 2 and places[0] == places[1]


def _wrapper(module: nn.Module, frames: list[FrameType]) -> nn.Module | None:
    callers = (frame.f_locals["self"] for frame in frames if _calls_forward(frame))
    return next((one for one in callers if isinstance(one, OptimizedModule) and one._orig_mod is module), None)


def leave_dynamo(call: ModuleCall) -> None:
    """Call the module directly from now on, without Dynamo in between."""
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
    """Whether it is Dynamo that calls the module whose call this is."""
    module = frame.f_locals["self"]
    outer = next(
        (
            other
            for other in _outward(frame)
            if other.f_code.co_filename != _MODULE.co_filename or other.f_locals.get("self") is not module
        ),
        None,
    )
    return outer is not None and _is_dynamo(outer)


def break_reason(graph: fx.GraphModule) -> tuple[str, str] | None:
    """Why Dynamo ended this graph before its function returned, and where in the user's code; None if it did not."""
    reason: Any = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    place = reason.user_stack[-1] if reason.user_stack else None
    where = "" if place is None else f"{place.filename}:{place.lineno}, in {place.name}"
    return str(reason.reason).strip(), where


def output_values(graph: fx.GraphModule) -> list[Any]:
    """Fake tensors, or other values, for what a graph of Dynamo returns."""
    output = next(iter(graph.graph.find_nodes(op="output")))
    return [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in output.args[0]]
