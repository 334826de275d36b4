"""The errors that autoshard raises for its users: one hierarchy, each also a `ValueError`."""

from __future__ import annotations


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
        peak: bytes per device of the smallest peak that was found; None where none was.
    """

    def __init__(self, message: str, peak: int | None = None) -> None:
        super().__init__(message)
        self.peak = peak


class PipelineError(AutoshardError, ValueError):
    """A pipeline can't be had as it was asked for: its stages, its microbatches or the order of its schedule."""


class RuleError(AutoshardError, ValueError):
    """A sharding rule does not parse, or does not fit the operator that it is for."""


class InputError(AutoshardError, ValueError):
    """A call passes inputs that do not fit what was captured or declared."""
