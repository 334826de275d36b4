"""What a search found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.memory.footprint import Memory
from autoshard.patterns.decisions import Decisions
from autoshard.program.predicted_program import PredictedProgram


class ProgramEstimate:
    """What the program of some decisions takes and holds, worked out when it is first asked for: that takes long.

    Args:
        program: makes the program's calls.
        replay: seconds of the step, those of them in which a device communicates and does not compute, and those of
            the optimizer's update.
        account: bytes of one device, and those at every moment of the step.
    """

    def __init__(
        self,
        program: Callable[[], PredictedProgram],
        replay: Callable[[PredictedProgram], tuple[float, float, float]],
        account: Callable[[PredictedProgram], tuple[Memory, np.ndarray]],
    ) -> None:
        self._make, self._replay, self._account = program, replay, account
        self._program: PredictedProgram | None = None  # until both are known: it is large
        self._times: tuple[float, float, float] | None = None
        self._footprint: tuple[Memory, np.ndarray] | None = None

    @property
    def times(self) -> tuple[float, float, float]:
        """Seconds of the step, those of them in which a device communicates and does not compute, and the update's."""
        if self._times is None:
            self._times = self._replay(self._cached_program())
            self._release_program()
        return self._times

    @property
    def footprint(self) -> tuple[Memory, np.ndarray]:
        """Bytes of one device, and those at every moment of the step."""
        if self._footprint is None:
            self._footprint = self._account(self._cached_program())
            self._release_program()
        return self._footprint

    def _cached_program(self) -> PredictedProgram:
        self._program = self._program or self._make()
        return self._program

    def _release_program(self) -> None:
        if self._times is not None and self._footprint is not None:
            self._program = None


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A solved plan.

    Attributes:
        decisions: what was decided.
        cost: seconds of the step, compute and collectives one after the other.
        lower_bound: no plan of the problem that was solved costs less.
        method: what found it.
        run: what its program takes and holds.
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
        """Bytes that it holds at every moment of the step."""
        return self.estimate.footprint[1]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step, what communication takes from the compute beside it included."""
        return self.estimate.times[0]

    @property
    def exposed_seconds(self) -> float:
        """Those of them in which a device communicates and does not compute."""
        return self.estimate.times[1]

    @property
    def update_seconds(self) -> float:
        """Predicted seconds of the optimizer's update, which follows the step."""
        return self.estimate.times[2]
