"""The errors that autoshard raises for its users, one hierarchy, each also a `ValueError`; and warnings."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


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
        peak: bytes per device of the smallest peak of a plan; None where there is no plan.
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


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning that points at the line outside of autoshard, and of torch within it, that called the library."""
    # `warnings` counts frames: 1 is this function, 2 its caller.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_library(frame):
        level, frame = level + 1, frame.f_back
    warning = category(message)
    warning.__dict__[_OWN] = True
    warnings.warn(warning, stacklevel=level)


_OWN = "_is_of_autoshard"


def is_own_warning(warning: Warning | str) -> bool:
    """Return True for a warning of `warn_caller`, whose place is a line of the user's."""
    return _OWN in getattr(warning, "__dict__", {})


# Beside this package: what it is called through where an optimizer steps, a module runs, or a context is entered.
_PACKAGES = (__name__.partition(".")[0], "torch", "contextlib", "functools", "threading")


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES
