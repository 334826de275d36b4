"""Limits of a search for a pipeline beside its own time limit."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Stopping:
    """Limits of a search for a pipeline, and whether Ctrl-C ended it.

    Attributes:
        deadline: `time.monotonic()` seconds at which the search ends, even without a plan.
        interrupted: True if Ctrl-C ended the search; the plan is the best one until then.
    """

    deadline: float = math.inf
    interrupted: bool = False
