"""What a search found."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.memory.footprint import Memory
from autoshard.patterns.decisions import Decisions


@dataclass(frozen=True, slots=True)
class Found:
    """A solved plan.

    Attributes:
        decisions: what was decided.
        cost: seconds of the step, compute and collectives one after the other.
        lower_bound: no plan of the problem that was solved costs less.
        method: what found it.
        memory: bytes of one device.
        held: bytes that it holds at every moment of the step.
    """

    decisions: Decisions
    cost: float
    lower_bound: float
    method: str
    memory: Memory
    held: np.ndarray = field(compare=False, repr=False)
