"""The predicted step of a candidate call by call, stored compactly, and as the record in a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autoshard.memory.footprint import AllocationKind
from autoshard.plans.step_replay import CollectiveSpan, ComputeSpan, HeldBytes, StepReplay
from autoshard.program.program_replay import COLLECTIVE_KINDS, collective_call
from autoshard.simulate.events import COMPUTE, Operation, Timeline

_DIGITS = 9  # nanoseconds, to keep files of plans small


@dataclass(frozen=True, slots=True, eq=False)
class CallTimes:
    """The calls of one replay that take time.

    Attributes:
        compute: array of shape `(calls, 3)`: moment, start and end of every kernel.
        collectives: the collectives.
        seconds, exposed, hidden: of the replay, as in `Timeline`.
    """

    # An array, since a search keeps many candidates with thousands of calls each.
    compute: np.ndarray
    collectives: tuple[CollectiveSpan, ...]
    seconds: float
    exposed: float
    hidden: float

    @staticmethod
    def of(
        calls: Sequence[tuple[Operation, fx.Node]], timeline: Timeline, groups: Sequence[str], operators: int
    ) -> CallTimes:
        """Return the times of the calls of a predicted program.

        Args:
            calls: operations in the order in which they are issued, with their nodes.
            timeline: their replay.
            groups: names of the mesh axes.
            operators: the number of operators of the step.
        """
        compute, collectives = [], []
        # A module that returns its arguments has no operators.
        moments, last = zip(calls, timeline.starts, timeline.ends, strict=True) if operators else (), operators - 1
        for (operation, node), start, end in moments:
            # Reshards of outputs have the position after the last operator.
            moment = node.meta["position"]
            if moment > last:
                moment = last
            if operation.stream == COMPUTE:
                if end > start:
                    compute.append((moment, start, end))
            elif node.target in COLLECTIVE_KINDS:
                call = collective_call(node, groups)
                span = (moment, round(start, _DIGITS), round(end, _DIGITS))
                collectives.append(CollectiveSpan(*span, call.kind, groups[call.axis], call.bytes))
        array = np.array(compute, dtype=np.float64).reshape(-1, 3)
        seconds = (round(amount, _DIGITS) for amount in (timeline.seconds, timeline.exposed, timeline.hidden))
        return CallTimes(array, tuple(collectives), *seconds)

    def step_replay(self, held: Mapping[AllocationKind, np.ndarray], operators: int) -> StepReplay:
        """Return the record for a plan.

        Args:
            held: kind of memory -> moments and bytes, from `memory.footprint.changes_by_kind`.
            operators: the number of operators of the step.
        """
        return StepReplay(
            compute=tuple(
                ComputeSpan(int(moment), round(start, _DIGITS), round(end, _DIGITS))
                for moment, start, end in self.compute.tolist()
            ),
            collectives=self.collectives,
            # The optimizer's update is the last moment. Memory held to the end is not freed in the step.
            held={
                kind: tuple(HeldBytes(moment, amount) for moment, amount in changes.tolist() if moment <= operators)
                for kind, changes in held.items()
            },
            seconds=self.seconds,
            exposed=self.exposed,
            hidden=self.hidden,
        )
