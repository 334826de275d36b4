"""What went wrong in capture, said with the user's own line."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import sympy
import torch
from torch import fx, nn

from autoshard.capture._torch import GuardOnDataDependentSymNode, around_dynamo
from autoshard.errors import AutoshardError, CaptureError

# Sympy is torch's for sizes; it draws random numbers on the way.
_FOLDERS = (*(Path(str(module.__file__)).parent for module in (torch, sympy)), Path(__file__).parents[1])
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)  # torchvision's files begin as torch's do

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

_TRACED = re.compile(r'File "(.+?)", line (\d+), in .*\n\s*(.*)')

_ADVICE = (
    (
        ("data-dependent", "Could not guard", "unbacked", "torch.cond", ".item()", "control flow"),
        "the graph must not depend on the numbers in a tensor, nor on drawn ones. Compute both ways and choose by "
        "torch.where, hoist the branch or the draw out of forward, or pass the value as a plain Python argument",
    ),
    (
        ("Constraints violated",),
        "leave the size out of dynamic, declare it as torch.export.Dim(name, min=..., max=...), or as a multiple such "
        'as 8 * torch.export.Dim("batch")',
    ),
    (
        ("assigned during export", "mutat"),
        "forward must not assign tensors to attributes. Register a buffer and update it in place, or return the value",
    ),
    (
        ("in output, which is not a known type",),
        "leave the object out of what forward returns (Hugging Face: pass use_cache=False for the key-value cache), or "
        "register its type with torch.utils._pytree.register_pytree_node",
    ),
    (
        ("numpy() is not supported", "data pointer", "data_ptr", "accessed from Triton", "active driver"),
        "capture runs the code on tensors that have no numbers, and what reads their memory (a Triton or C++ kernel, "
        "NumPy) can't. Wrap it in torch.library.custom_op, give it the shapes of its results with register_fake, and "
        "call that operator, in the forward and backward of a torch.autograd.Function too; with "
        "autoshard.register_rule it is sharded, and without a rule every rank runs it whole. Or leave it out of "
        "forward: a loss that matches predictions to labels can be computed from what the model returns without labels",
    ),
    (
        ("process group has not been initialized", "group cannot be None"),
        "what is captured is the step of one device, of which autoshard makes the collectives: leave them out of "
        "forward",
    ),
    (
        ("Unexpected fake buffer",),
        "code that runs in backward reads a tensor of forward that it was not given. Pass it as an argument to the "
        "function, or save it with ctx.save_for_backward",
    ),
    (
        ("Unsupported input type", "Invalid input type", "pytree"),
        "arguments are tensors, plain values, or containers known to torch.utils._pytree; register the type there",
    ),
)


def advice_for(text: str) -> str | None:
    """What to do about an error of this text; None where nothing is known."""
    return next((advice for words, advice in _ADVICE if any(word in text for word in words)), None)


def capture_error(model: str, error: BaseException) -> CaptureError:
    """A `CaptureError` for an exception that came out of `torch.export` or of tracing the backward pass."""
    where = user_line(error.__traceback__)
    text = str(error).strip()
    reason = text.splitlines()[0].split(" (unhinted:")[0] if text else "no further message"
    said = [line.strip(" -") for line in text.splitlines() if line.startswith("  - ")]  # of every dynamic size
    reason = " ".join([reason.split("!")[0] + ":", *said]) if "Constraints violated" in reason else reason
    advice = advice_for(text)
    return CaptureError(
        f"{model} could not be captured as one graph{where}: {type(error).__name__}: {reason.rstrip('.')}. "
        + (f"What to do: {advice}." if advice else "Check that the module runs with these arguments on one device.")
    )


class ModelError(Exception):
    """Carries an error that `forward` itself raises for the numbers in its inputs out of a capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def refusing_branches(module: nn.Module, has_read: Callable[[], bool]) -> Iterator[None]:
    """While active, a branch on data in `forward` is a `CaptureError` at once: torch would write out the graph.

    Args:
        module: that is captured.
        has_read: whether `forward` takes a way that depends on the numbers in its inputs: an error there is its own.
    """
    forward, own = module.forward, module.__dict__.get("forward")

    @functools.wraps(forward)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            raise capture_error(type(module).__name__, error) from error
        except Exception as error:
            if has_read() and _is_raised_by_user(error):
                raise ModelError(error) from error
            raise

    module.forward = refusing
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


class Regions:
    """The user's lines at which code is read for graphs of its own, as that of a branch or a loop is."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Context of the export."""
        return around_dynamo(lambda: self._lines.append(running_line()), lambda: None)

    def check(self, graph: fx.Graph) -> None:
        """Refuse a branch or a loop; regions without gradients, or under autocast, are plain code."""
        for node in graph.nodes:
            if getattr(node.target, "namespace", "") == "higher_order" and not str(node.target).startswith("wrap_"):
                where = f"{self._lines[0]}: " if self._lines else ""
                raise CaptureError(
                    f"{where}{node_place(node, 'is a branch or a loop with graphs of its own, and there is no')} "
                    "plan. Compute both ways and choose by torch.where; write a loop of a fixed length as one of "
                    "Python's, and map as operators on a batch dim."
                )


def _is_raised_by_user(error: Exception) -> bool:
    """Whether a `raise` or an `assert` of the user's raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = last.line or ""
    return not last.filename.startswith(_LIBRARIES) and ("raise " in line or line.startswith("assert "))


def known_error(error: BaseException) -> AutoshardError | None:
    """The error of ours that made torch raise another one; None where there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AutoshardError):
        cause = cause.__cause__ or cause.__context__
    return cause


def user_line(trace: TracebackType | None) -> str:
    """Text such as ` at model.py:12 (if x.sum() > 0:)`: the innermost frame outside of torch and autoshard."""
    line = _innermost_user_frame(traceback.extract_tb(trace))
    return f" at {line}" if line else ""


def node_place(node: fx.Node, what: str) -> str:
    """What is wrong with a node, with its module and the user's line."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    line = node_line(node)
    return f"{node.target} in {path or 'the root module'} {what}" + (f", at {line}" if line else "")


def shape_error(say: Callable[[str], str]) -> CaptureError:
    """The error for code that gives a tensor of the caller's, or of the module's, another shape in place.

    Args:
        say: puts what is wrong into words that name the code.
    """
    return CaptureError(
        f"{say('gives a tensor that forward did not make another shape, in place')}. Compute a new tensor, such as "
        "x.unsqueeze(0) in place of x.unsqueeze_(0)."
    )


def node_line(node: fx.Node) -> str:
    """Text such as `model.py:12 (y = x + 1)` of the user's line that a node comes from; empty where none is known."""
    frames = [
        traceback.FrameSummary(name, int(number), "", line=source)
        for name, number, source in _TRACED.findall(node.meta.get("stack_trace") or "")
    ]
    return _innermost_user_frame(traceback.StackSummary.from_list(frames))


def code_line(filename: str, number: int) -> str:
    """Text such as `model.py:12 (y = x + 1)` of a line of a file."""
    source = linecache.getline(filename, number).strip()
    return f"{filename}:{number}" + (f" ({source})" if source else "")


def running_line() -> str:
    """Text such as `model.py:12 (if x.sum() > 0:)` of the user's line that is running now."""
    return _innermost_user_frame(traceback.extract_stack())


def running_frame() -> traceback.FrameSummary | None:
    """The frame of the user's line that is running now."""
    return _user_frames(traceback.extract_stack())


def _innermost_user_frame(frames: traceback.StackSummary) -> str:
    """The last frame of the user's with its source; nothing where there is none."""
    frame = _user_frames(frames)
    return "" if frame is None else code_line(frame.filename, frame.lineno or 0)


def _user_frames(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    return next((frame for frame in reversed(frames) if is_users_file(frame.filename)), None)


def is_users_file(filename: str) -> bool:
    """Whether code of a file is the user's: neither of torch nor of autoshard nor of Python itself."""
    return not (filename.startswith(("<", *_LIBRARIES)) or _is_standard_library(filename))


def _is_standard_library(filename: str) -> bool:
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
