"""What a search found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.memory.footprint import Memory
from autoshard.patterns.decisions import Decisions
from autoshard.planner.skeleton import Skeleton


class Run:
    """What the program of some decisions takes and holds, worked out when it is first asked for: that takes long.

    Args:
        program: makes the program's calls.
        replay: seconds of the step, those of them in which a device communicates and does not compute, and those of
            the optimizer's update.
        account: bytes of one device, and those at every moment of the step.
    """

    def __init__(
        self,
        program: Callable[[], Skeleton],
        replay: Callable[[Skeleton], tuple[float, float, float]],
        account: Callable[[Skeleton], tuple[Memory, np.ndarray]],
    ) -> None:
        self._make, self._replay, self._account = program, replay, account
        self._program: Skeleton | None = None  # until both are known: it is large
        self._taken: tuple[float, float, float] | None = None
        self._held: tuple[Memory, np.ndarray] | None = None

    @property
    def taken(self) -> tuple[float, float, float]:
        """Seconds of the step, those of them in which a device communicates and does not compute, and the update's."""
        if self._taken is None:
            self._taken = self._replay(self._made())
            self._let_go()
        return self._taken

    @property
    def held(self) -> tuple[Memory, np.ndarray]:
        """Bytes of one device, and those at every moment of the step."""
        if self._held is None:
            self._held = self._account(self._made())
            self._let_go()
        return self._held

    def _made(self) -> Skeleton:
        self._program = self._program or self._make()
        return self._program

    def _let_go(self) -> None:
        if self._taken is not None and self._held is not None:
            self._program = None


@dataclass(frozen=True, slots=True)
class Found:
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
    run: Run = field(compare=False, repr=False)

    @property
    def memory(self) -> Memory:
        """Bytes of one device."""
        return self.run.held[0]

    @property
    def held(self) -> np.ndarray:
        """Bytes that it holds at every moment of the step."""
        return self.run.held[1]

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step, what communication takes from the compute beside it included."""
        return self.run.taken[0]

    @property
    def exposed(self) -> float:
        """Those of them in which a device communicates and does not compute."""
        return self.run.taken[1]

    @property
    def update_seconds(self) -> float:
        """Predicted seconds of the optimizer's update, which follows the step."""
        return self.run.taken[2]
