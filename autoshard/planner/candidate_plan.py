"""A solved plan, and the time and memory of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoshard.memory.footprint import Memory
from autoshard.patterns.decisions import Decisions
from autoshard.program.predicted_program import PredictedProgram


class ProgramEstimate:
    """Time and memory of the program of some decisions, each computed on first use since that takes long.

    Args:
        make_program: makes the program.
        measure_times: returns the values of `times` for a program.
        measure_memory: returns the values of `footprint` for a program.
    """

    def __init__(
        self,
        make_program: Callable[[], PredictedProgram],
        measure_times: Callable[[PredictedProgram], tuple[float, float, float]],
        measure_memory: Callable[[PredictedProgram], tuple[Memory, np.ndarray]],
    ) -> None:
        self._make_program, self._measure_times, self._measure_memory = make_program, measure_times, measure_memory
        self._program: PredictedProgram | None = None

    @cached_property
    def times(self) -> tuple[float, float, float]:
        """Seconds of the step, its seconds of exposed communication, and seconds of the optimizer's update."""
        return self._measure_times(self._take_program())

    @cached_property
    def footprint(self) -> tuple[Memory, np.ndarray]:
        """Bytes of one device, and those at every moment of the step."""
        return self._measure_memory(self._take_program())

    def _take_program(self) -> PredictedProgram:
        # Made for the first measurement and dropped at the second: a program is large, and a search keeps many plans.
        program = self._program or self._make_program()
        self._program = None if self._program else program
        return program


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A solved plan.

    Attributes:
        decisions: the decisions.
        cost: seconds of the step without overlap: the sum of compute and collectives.
        lower_bound: a lower bound of the cost of every plan of the problem.
        method: the method that found it.
        estimate: time and memory of its program.
    """

    decisions: Decisions
    cost: float
    lower_bound: float
    method: str
    estimate: ProgramEstimate = field(compare=False, repr=False)

    @property
    def memory(self) -> Memory:
        """Bytes of one device."""
        return self.estimate.footprint[0]

    @property
    def held_bytes(self) -> np.ndarray:
        """Bytes of one device at every moment of the step."""
        return self.estimate.footprint[1]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step, with communication that slows down the compute beside it."""
        return self.estimate.times[0]

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the step in which a device communicates and does not compute."""
        return self.estimate.times[1]

    @property
    def update_seconds(self) -> float:
        """Predicted seconds of the optimizer's update, which follows the step."""
        return self.estimate.times[2]
