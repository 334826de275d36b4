"""Actions of ranks in torch's notation, and schedules: the order of the computations of every rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from autoshard.errors import PipelineError


class ActionKind(StrEnum):
    """Kinds of actions; the values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    TOGETHER = "OVERLAP_F_B"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"
    REDUCE = "REDUCE_GRAD"


class Action(NamedTuple):
    """One entry of a rank's list, written as `torch.distributed.pipelining` writes it: `2F0`, `1SEND_B3`.

    Attributes:
        stage: the stage that runs it; -1 for several actions in one.
        kind: of the action.
        microbatch: counted from 0; None for an action that is not of one microbatch.
        parts: the computations of a `TOGETHER`. They start when all have their inputs, run in turn, and send their
            results after the last.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action of a text; `str` is the inverse."""
        if text.startswith("("):
            inner, kind = text[1:].split(")")
            return Action(-1, ActionKind(kind), None, tuple(Action.parse(part) for part in inner.split(";")))
        match = _ACTION.fullmatch(text)
        if match is None:
            raise PipelineError(
                f"{text!r} is no action of a schedule: write a stage, what is done ({', '.join(ActionKind)}) and a "
                f"microbatch, such as 2F0."
            )
        stage, kind, microbatch = match.groups()
        return Action(int(stage), ActionKind(kind), int(microbatch) if microbatch else None)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def computations(self) -> tuple[Action, ...]:
        """The action itself, or its parts."""
        return self.parts or (self,)


_ACTION = re.compile(rf"(\d+)({'|'.join(kind for kind in ActionKind if kind != ActionKind.TOGETHER)})(\d*)")


@dataclass(frozen=True)
class Schedule:
    """The computations of one step, for every rank in its order.

    Attributes:
        name: one of `SCHEDULES`, or another.
        microbatches: per batch.
        orders: the actions of every rank: forward, backward, or the two halves of backward; no messages.

    Raises:
        PipelineError: a stage is on two ranks, a microbatch does not go through a stage once forward and once backward,
            or ranks have different numbers of stages.
    """

    name: str
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        done = Counter((action.stage, action.kind, action.microbatch) for _, action in self._computations())
        held = Counter(self.placement)
        if len(set(held.values())) > 1 or len(held) < self.ranks:
            raise PipelineError(
                f"schedule {self.name} gives its ranks {[held[rank] for rank in range(self.ranks)]} stages: torch's "
                f"runtime needs equally many on each. Share the stages out evenly."
            )
        expected = sum(
            _check_once(self.name, done, stage, microbatch)
            for stage in range(self.stages)
            for microbatch in range(self.microbatches)
        )
        if sum(done.values()) > expected:
            raise PipelineError(
                f"schedule {self.name} holds actions of microbatches from {self.microbatches} on, or that are no "
                f"computations. Leave them out: messages and reductions are added where it is run."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.placement)

    @property
    def virtual(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        ranks: dict[int, int] = {}
        for rank, action in self._computations():
            if ranks.setdefault(action.stage, rank) != rank:
                raise PipelineError(
                    f"schedule {self.name} runs {action} on rank {rank}, and stage {action.stage} on rank "
                    f"{ranks[action.stage]} too: all actions of a stage belong on the rank that holds it."
                )
        if sorted(ranks) != list(range(len(ranks))):
            raise PipelineError(f"schedule {self.name} runs stages {sorted(ranks)}: stages count from 0, without gaps.")
        return tuple(ranks[stage] for stage in range(len(ranks)))

    @property
    def splits_backward(self) -> bool:
        """True if some backward runs in two halves, the one for inputs first."""
        return any(action.kind == ActionKind.WEIGHT_BACKWARD for _, action in self._computations())

    def _computations(self) -> Iterable[tuple[int, Action]]:
        for rank, order in enumerate(self.orders):
            for action in order:
                for part in action.computations:
                    yield rank, part


def _check_once(name: str, done: Counter[tuple[int, ActionKind, int | None]], stage: int, microbatch: int) -> int:
    """Refuse a microbatch that does not pass a stage once each way; return the number of its actions there."""
    forward, whole, for_inputs, for_weights = (
        done[stage, kind, microbatch]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD)
    )
    if forward != 1 or (whole, for_inputs, for_weights) not in ((1, 0, 0), (0, 1, 1)):
        raise PipelineError(
            f"schedule {name} runs microbatch {microbatch} on stage {stage} {forward} times forward, {whole} times "
            f"backward, and {for_inputs} and {for_weights} times the halves of backward for inputs and for weights: it "
            f"needs one forward, and one backward or one of each half."
        )
    return 2 + for_inputs
