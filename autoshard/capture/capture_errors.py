"""Errors of capture, with the user's source line and advice."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import sympy
import torch
from torch import fx

from autoshard.capture._torch import around_dynamo
from autoshard.errors import PYTHON_ERRORS, AutoshardError, CaptureError, is_raised

# Torch computes sizes with sympy, which draws random numbers.
_FOLDERS = (*(Path(str(module.__file__)).parent for module in (torch, sympy)), Path(__file__).parents[1])
# With a separator: torchvision's path begins with torch's.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

# A frame in the text of a node's stack that torch.export records.
_TRACED = re.compile(r'File "(.+?)", line (\d+), in .*\n\s*(.*)')

_MASK_ADVICE = (
    "picking elements by a computed mask: keep the whole tensor, and choose by torch.where in place of boolean "
    "indexing, or multiply by the mask"
)

# Replacements of code that depends on numbers computed in `forward`, by words in the line.
_EXPERTS = r"expert|router|routed|\bmoe\b"
_NUMBERS_ADVICE = (
    (
        _EXPERTS,
        "experts that each take their own tokens: which experts are hit depends on the router. Sort the "
        "tokens by expert and multiply by torch.nn.functional.grouped_mm, or run every expert on all tokens as one "
        "batched product (torch.einsum) and weight the results by the router, with zeros for tokens of others; both "
        "have rules that split the experts. In models of Hugging Face that have it, experts_implementation="
        '"grouped_mm" does so; in others, replace the module of the experts before autoshard.parallelize',
    ),
    (
        r"layer_?drop|dropout_probability",
        "layers that are dropped at random: set their probability to 0 (Hugging Face: layerdrop=0.0, "
        "encoder_layerdrop=0.0, decoder_layerdrop=0.0)",
    ),
    (r"^(if|elif|while|assert)\b| if .* else ", "a branch: compute both ways and choose by torch.where"),
    (r"\[[^\]]*[<>=~][^\]]*\]|nonzero|masked_select|unique", _MASK_ADVICE),
    (
        r"\.max\(|\.sum\(|\.amax\(|length|\bsize|arange|\.shape|aten\.item",
        "sizes that forward computes: give the tensor a size that is known before (pad to the longest that may come, "
        "and mask what is behind the end), or compute the lengths outside of forward and pass them as an input or a "
        "plain Python argument, of which each value has a program of its own",
    ),
    (r"\[|aten\.index|where\(", _MASK_ADVICE),
)


def numbers_advice(line: str, operator: str = "") -> str:
    """Return advice for a user's line, and its operator, that depends on computed numbers."""
    code = line.partition(" (")[2].removesuffix(")")
    # The line may only call the relevant function: then the operator says more. In a loop over experts, a line such as
    # `if len(rows):` names none.
    loops = " ".join(head for head in _loop_heads(line) if re.search(_EXPERTS, head, re.IGNORECASE))
    for text in (loops, code, operator):
        for words, advice in _NUMBERS_ADVICE:
            if re.search(words, text, re.IGNORECASE):
                return f"For {advice}"
    return "Compute both ways and choose by torch.where, or use an operator of fixed size"


def _loop_heads(line: str) -> list[str]:
    """Return the header lines of the loops around a line, innermost first."""
    place = re.match(r"(?: at )?(.+?):(\d+)(?: \(|$)", line)
    if place is None:
        return []
    file, last = place[1], int(place[2])
    heads = []
    indent = len(_indent(linecache.getline(file, last)))
    for number in range(last - 1, 0, -1):
        source = linecache.getline(file, number)
        if source.strip() and len(_indent(source)) < indent:
            indent = len(_indent(source))
            if re.match(r"\s*(async )?def |\s*class ", source):
                break
            if source.lstrip().startswith(("for ", "while ")):
                heads.append(source.strip())
    return heads


def _indent(source: str) -> str:
    return source[: len(source) - len(source.lstrip())]


# Words in an error's text, and advice; the first matching entry is used.
_ADVICE = (
    (
        ("missing a required argument", "too many positional arguments", "got an unexpected keyword argument"),
        "pass the arguments of one call of forward as example_args and example_kwargs",
    ),
    (
        ("data-dependent", "Could not guard", "unbacked", "torch.cond", ".item()", "control flow"),
        "the graph must not depend on numbers that forward computes, nor on drawn ones. {numbers}. Or hoist the branch "
        "or the draw out of forward, and pass the value as a plain Python argument",
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
        ("<class 'transformers.cache_utils",),
        "a cache of transformers lies whole on one device. Call "
        "autoshard.integrations.generation.prepare_generation(model) before model.generate(...), which then makes "
        "caches in shards; or pass use_cache=False",
    ),
    (
        ("Unsupported input type", "Invalid input type", "pytree"),
        "arguments are tensors, plain values, or containers known to torch.utils._pytree; register the type there",
    ),
)


OBJECT_FAULT = "takes an object such as a torch.Generator, which no graph can hold"
OBJECT_ADVICE = (
    "Leave the generator out: numbers are drawn by the seed of the step, the same on every mesh of one shape; or draw "
    "them outside of forward."
)


def advice_for(text: str, line: str = "") -> str | None:
    """Return advice on an error with this text at a user's line, or None."""
    advice = next((advice for words, advice in _ADVICE if any(word in text for word in words)), None)
    return None if advice is None else advice.replace("{numbers}", numbers_advice(line))


def capture_error(model: str, error: BaseException) -> CaptureError:
    """Return a `CaptureError` for an exception of `torch.export` or of tracing the backward pass."""
    where = user_line(error.__traceback__)
    text = str(error).strip()
    if "argument of type: <class 'torch._C.Generator'>" in text:  # torch 2.11 and 2.12 cannot trace it
        fault = f"a call{where} {OBJECT_FAULT}"
        return CaptureError(f"{model} could not be captured as one graph: {fault}. {OBJECT_ADVICE}")
    reason = text.splitlines()[0].split(" (unhinted:")[0] if text else "no further message"
    if "Constraints violated" in reason:
        # The first line names no size; a list with one item per dynamic size follows.
        items = [line.strip(" -") for line in text.splitlines() if line.startswith("  - ")]
        reason = " ".join([reason.split("!")[0] + ":", *items])
    advice = advice_for(text, where)
    if is_fault(error) and (advice is None or not _is_meant(error)):
        return CaptureError(f"{model} could not be captured as one graph{where}: {fault_reason(error)}")
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return CaptureError(
            f"{model} could not be captured as one graph{where}: the line asks for a number that forward computes. "
            f"What to do: {advice}."
        )
    what = f"What to do: {advice}" if advice else f"If the module runs with these arguments on one device, {_AROUND}"
    return CaptureError(
        f"{model} could not be captured as one graph{where}: {type(error).__name__}: {reason.rstrip('.')}. {what}."
    )


# Advice if no cause is known for a line that runs on one device and cannot be captured.
_AROUND = (
    "what the line does can't be captured: compute it outside of forward and pass the result, or wrap it in "
    "torch.library.custom_op"
)

_LAYERS = f"{Path(str(torch.nn.__file__)).parent}{os.sep}"


def is_fault(error: BaseException) -> bool:
    """Return True for an error that Python itself raised in code of autoshard or torch, not of the user.

    `torch.nn` layers count as the model's: their errors, such as about wrong shapes, also occur on one device.
    """
    if type(error).__module__ != "builtins" or not isinstance(error, PYTHON_ERRORS):
        return False
    # A ValueError may be raised by a library for its users, or by Python for lists of different lengths.
    if isinstance(error, ValueError) and is_raised(error):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or not (is_users_file(frames[-1].filename) or frames[-1].filename.startswith(_LAYERS))


def _is_meant(error: BaseException) -> bool:
    """Return True for a Python error that code raised on purpose, or that is about the arguments of `forward`."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    line = (last[0].line or "") if last else ""
    return line.startswith(("raise ", "assert ")) or "forward()" in str(error)


def fault_reason(error: BaseException) -> str:
    """Return sentences that say which code failed, without the error's text, which adds nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"code that captures the module failed{place}, and the error above says how. If the module runs with these "
        "arguments on one device, this is a fault of autoshard or of torch: please report it with all of the "
        f"traceback. Until it is mended, {_AROUND.partition(': ')[2]}."
    )


class ModelError(Exception):
    """Carrier of an error that `forward` itself raises, because of numbers in its inputs, out of a capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Regions:
    """The user's lines at which Dynamo traces code into a separate graph, such as that of a branch or a loop."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Context for the export."""
        return around_dynamo(lambda: self._lines.append(running_line()), lambda: None)

    def check(self, graph: fx.Graph) -> None:
        """Raise a `CaptureError` for a branch or a loop with separate graphs."""
        for node in graph.nodes:
            # Operators named `wrap_` are regions of plain code without gradients or under autocast.
            if getattr(node.target, "namespace", "") == "higher_order" and not str(node.target).startswith("wrap_"):
                where = f"{self._lines[0]}: " if self._lines else ""
                raise CaptureError(
                    f"{where}{node_place(node, 'is a branch or a loop with graphs of its own, and there is no')} "
                    "plan. Compute both ways and choose by torch.where; write a loop of a fixed length as one of "
                    "Python's, and map as operators on a batch dim."
                )


def is_raised_by_user(error: Exception) -> bool:
    """Return True if the user's `raise` or `assert` statement raised the error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = last.line or ""
    return not last.filename.startswith(_LIBRARIES) and ("raise " in line or line.startswith("assert "))


def known_error(error: BaseException) -> AutoshardError | None:
    """Return the error of autoshard that caused torch's error, or None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, AutoshardError):
        cause = cause.__cause__ or cause.__context__
    return cause


def user_line(trace: TracebackType | None) -> str:
    """Return text such as ` at model.py:12 (if x.sum() > 0:)` for the innermost frame outside torch and autoshard."""
    line = _line_of(traceback.extract_tb(trace))
    return f" at {line}" if line else ""


def node_place(node: fx.Node, what: str) -> str:
    """Return the start of an error about a node: its module, the fault, and the user's line."""
    stack = node.meta.get("nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    line = node_line(node)
    return f"{node.target} in {path or 'the root module'} {what}" + (f", at {line}" if line else "")


def shape_error(say: Callable[[str], str]) -> CaptureError:
    """Return the error for code that changes the shape of the caller's or the module's tensor in place.

    Args:
        say: returns a sentence, given its predicate, with the code as its subject.
    """
    return CaptureError(
        f"{say('gives a tensor that forward did not make another shape, in place')}. Compute a new tensor, such as "
        "x.unsqueeze(0) in place of x.unsqueeze_(0)."
    )


def node_line(node: fx.Node) -> str:
    """Return text such as `model.py:12 (y = x + 1)` for the user's line of a node; empty if unknown."""
    frames = [
        traceback.FrameSummary(name, int(number), "", line=source)
        for name, number, source in _TRACED.findall(node.meta.get("stack_trace") or "")
    ]
    return _line_of(traceback.StackSummary.from_list(frames))


def code_line(filename: str, number: int) -> str:
    """Return text such as `model.py:12 (y = x + 1)` for a line of a file."""
    source = linecache.getline(filename, number).strip()
    return f"{filename}:{number}" + (f" ({source})" if source else "")


def running_line() -> str:
    """Return text such as `model.py:12 (if x.sum() > 0:)` for the user's line that is running."""
    frame = running_frame()
    return "" if frame is None else code_line(frame.f_code.co_filename, frame.f_lineno)


def running_frame() -> FrameType | None:
    """Return the innermost frame of user code that is running."""
    # Runs at every attribute assignment: `traceback.extract_stack` would read the source of every frame.
    frame = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line_of(frames: traceback.StackSummary) -> str:
    """Return the line of the user's innermost frame; empty if there is none."""
    lines = (code_line(each.filename, each.lineno or 0) for each in reversed(frames) if is_users_file(each.filename))
    return next(lines, "")


def is_users_file(filename: str) -> bool:
    """Return True if a file contains user code: not that of torch, autoshard or Python's standard library."""
    # Installed packages are below the folder of the standard library.
    is_standard = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    return not (is_standard or filename.startswith(("<", *_LIBRARIES)))
