"""A solved plan, and the time and memory of its program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
        self._times: tuple[float, float, float] | None = None
        self._footprint: tuple[Memory, np.ndarray] | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of the step, its seconds of exposed communication, and seconds of the optimizer's update."""
        if self._times is None:
            self._times = self._measure_times(self._cached_program())
            self._release_program()
        return self._times

    @property
    def footprint(self) -> tuple[Memory, np.ndarray]:
        """Bytes of one device, and those at every moment of the step."""
        if self._footprint is None:
            self._footprint = self._measure_memory(self._cached_program())
            self._release_program()
        return self._footprint

    def _cached_program(self) -> PredictedProgram:
        self._program = self._program or self._make_program()
        return self._program

    def _release_program(self) -> None:
        # A program is large, and a search keeps many candidates.
        if self._times is not None and self._footprint is not None:
            self._program = None


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
