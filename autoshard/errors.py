"""The errors that autoshard raises for its users, one hierarchy of `ValueError`s; and warnings."""

from __future__ import annotations

import dis
import os
import sys
import warnings
from types import FrameType, TracebackType


class AutoshardError(Exception):
    """Base class of every error that autoshard raises on purpose."""


class CaptureError(AutoshardError, ValueError):
    """The module could not be captured as one graph."""


class HintError(AutoshardError, ValueError):
    """A hint matches nothing, names what does not exist, or contradicts another."""


class MeshError(AutoshardError, ValueError):
    """The mesh does not fit the world, the module or the plan."""


class PlanError(AutoshardError, ValueError):
    """A plan is damaged, or belongs to another model, mesh or version."""


class BudgetError(AutoshardError, ValueError):
    """No plan fits the memory limit.

    Attributes:
        peak: the smallest peak of any plan found, in bytes per device; None where there is no plan.
    """

    def __init__(self, message: str, peak: int | None = None) -> None:
        super().__init__(message)
        self.peak = peak


class PipelineError(AutoshardError, ValueError):
    """A pipeline can't have the stages, the microbatches or the schedule that were asked for."""


class RuleError(AutoshardError, ValueError):
    """A sharding rule does not parse, or does not fit the operator that it is for."""


class InputError(AutoshardError, ValueError):
    """A call passes inputs that do not fit what was captured or declared."""


class VerifyError(AutoshardError, ValueError):
    """The programs of a plan compute other numbers than one device."""


def reason_of(error: Exception) -> str:
    """Return the text of an error that autoshard raised on purpose, to quote in an error for users.

    Other errors are raised again: Python's message about a missing key or a wrong type tells a user nothing, and hides
    a fault of autoshard.
    """
    if isinstance(error, AutoshardError) or _is_raised_by_us(error):
        return str(error)
    error.add_note("This is a fault of autoshard: please report it with all of the traceback.")
    raise error


def summary_of(error: BaseException) -> str:
    """Return the type and text of an error, to quote on another rank; for Python's own errors, type and place."""
    trace = _innermost(error)
    if trace is None or is_raised(error) or not isinstance(error, PYTHON_ERRORS):
        return f"{type(error).__name__}: {error}"
    place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
    return f"{type(error).__name__} at {place}, a fault of that code: its traceback is in the output of that rank"


PYTHON_ERRORS = (
    *(AttributeError, NameError, TypeError, LookupError, ArithmeticError, AssertionError, RecursionError),
    *(StopIteration, ImportError, BufferError, ValueError),
)
"""Errors that Python raises where code is wrong, with texts that tell its users nothing."""


def _is_raised_by_us(error: BaseException) -> bool:
    """Return True if a `raise` in a file of autoshard raised the error, rather than Python or another library."""
    trace = _innermost(error)
    folder = os.path.join(os.path.dirname(__file__), "")
    return trace is not None and trace.tb_frame.f_code.co_filename.startswith(folder) and is_raised(error)


def is_raised(error: BaseException) -> bool:
    """Return True if a `raise` statement raised the error, rather than an operation that failed."""
    trace = _innermost(error)
    # The bytecode instruction tells them apart, with or without source code.
    is_raise = trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and not isinstance(error, AssertionError)


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def file_problem(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be read as text."""
    return "it is not text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or "it is not there"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the library, outside of autoshard and of the torch frames around it."""
    # `warnings` counts frames: 1 is this function, 2 its caller.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        level, frame = level + 1, frame.f_back
    warning = category(message)
    warning.__dict__[_OWN] = True
    warnings.warn(warning, stacklevel=level)


_OWN = "_is_of_autoshard"


def is_own_warning(warning: Warning | str) -> bool:
    """Return True for a warning of `warn_caller`, which points at a line of the user's."""
    return _OWN in getattr(warning, "__dict__", {})


# This package, and what calls it when an optimizer steps, a module runs, or a context is entered.
_PACKAGES = (__name__.partition(".")[0], "torch", "contextlib", "functools", "threading")


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES
