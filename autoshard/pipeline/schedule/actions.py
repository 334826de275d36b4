"""Actions of ranks in torch's notation, schedules as lists of them, torch's own schedules, and message positions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from autoshard.errors import PipelineError
from autoshard.names import suggestion
from autoshard.pipeline import _torch


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
    REDUCTION = "REDUCE_GRAD"


class Action(NamedTuple):
    """An entry of a rank's list, in the notation of `torch.distributed.pipelining`: `2F0`, `1SEND_B3`.

    Attributes:
        stage: the stage that runs it; -1 for several actions combined.
        kind: the kind of action.
        microbatch: counted from 0; None for an action that does not belong to one microbatch.
        parts: the computations of a `TOGETHER`. They start once all have their inputs, run in turn, and send their
            results after the last one.
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


# Without `TOGETHER`, whose parts are in brackets and parsed separately.
_ACTION = re.compile(rf"(\d+)({'|'.join(kind for kind in ActionKind if kind != ActionKind.TOGETHER)})(\d*)")


@dataclass(frozen=True)
class Schedule:
    """The computations of one step in each rank's order.

    Attributes:
        name: one of `SCHEDULES`, or another.
        microbatches: the number per batch.
        orders: the actions of every rank: forward, backward, or the two halves of backward; no messages.

    Raises:
        PipelineError: a stage is on two ranks, a microbatch does not pass a stage once forward and once backward, or
            ranks have different numbers of stages.
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
        # Every microbatch is complete on every stage; the schedule has no other actions.
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
        """True if some backward is split into two halves, the one for inputs first."""
        return any(action.kind == ActionKind.WEIGHT_BACKWARD for _, action in self._computations())

    def _computations(self) -> Iterable[tuple[int, Action]]:
        for rank, order in enumerate(self.orders):
            for action in order:
                for part in action.computations:
                    yield rank, part


def _check_once(name: str, done: Counter[tuple[int, ActionKind, int | None]], stage: int, microbatch: int) -> int:
    """Check that a microbatch passes a stage once each way, and return the number of its actions there."""
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


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """The requirements of one schedule.

    Attributes:
        virtual: the minimum and the maximum of stages per rank; None for no maximum.
        turns: True if stages are placed along the ranks and back (in a V) instead of round-robin.
        halves: True if backward may run in halves, the one for inputs first.
        even_rounds: True if microbatches come in rounds of equal size, each of at least as many as there are ranks.
        least: returns the minimum of microbatches for a number of ranks.
        ours: makes the order of one rank, for schedules whose class in torch has no list of actions; otherwise None.
    """

    virtual: tuple[int, int | None]
    turns: bool = False
    halves: bool = False
    even_rounds: bool = False
    least: Callable[[int], int] = lambda ranks: 1
    ours: Callable[[int, int, int], Iterable[Action]] | None = None

    def refusal(self, ranks: int, virtual: int, microbatches: int) -> str | None:
        """Return why there is no such schedule, with a remedy; None if there is one."""
        least, most = self.virtual
        if virtual < least or (most is not None and virtual > most):
            allowed = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
            return f"it needs {allowed} {'stage' if allowed == '1' else 'stages'} per rank, not {virtual}"
        if microbatches < self.least(ranks):
            return f"on {ranks} ranks it needs at least {self.least(ranks)} microbatches, not {microbatches}"
        # The number of rounds in torch's classes.
        rounds = max(1, microbatches // ranks)
        if self.even_rounds and microbatches % rounds:
            near = [microbatches - microbatches % ranks, microbatches + -microbatches % ranks]
            return (
                f"its {microbatches} microbatches make {rounds} rounds of at least {ranks}, one for every rank, which "
                f"are not equal; {near[0]} or {near[1]} microbatches would make equal ones"
            )
        return None


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterable[Action]:
    """Yield one forward for each rank from this one to the last, then alternate backward and forward."""
    ahead = min(microbatches, ranks - rank)
    yield from (Action(rank, ActionKind.FORWARD, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        yield Action(rank, ActionKind.BACKWARD, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(rank, ActionKind.FORWARD, microbatch + ahead)


SCHEDULES: dict[str, ScheduleFamily] = {
    # All forwards, then all backwards, with microbatches in the same order.
    "GPipe": ScheduleFamily(
        (1, 1),
        ours=lambda rank, ranks, microbatches: [
            Action(rank, kind, microbatch)
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
            for microbatch in range(microbatches)
        ],
    ),
    "1F1B": ScheduleFamily((1, 1), least=lambda ranks: ranks, ours=_one_forward_one_backward),
    "Interleaved1F1B": ScheduleFamily((2, None), even_rounds=True),
    "LoopedBFS": ScheduleFamily((2, None)),
    "InterleavedZeroBubble": ScheduleFamily((1, None), halves=True, even_rounds=True),
    "ZBVZeroBubble": ScheduleFamily((2, 2), turns=True, halves=True),
    "DualPipeV": ScheduleFamily((2, 2), turns=True, halves=True, least=lambda ranks: 2 * ranks),
}
"""The requirements of every schedule of torch, by the name of its class without "Schedule".

GPipe and 1F1B (Rhino 6.2) have one stage per rank. The interleaved ones and LoopedBFS place stages round-robin, ZB-V
and DualPipeV in a V, so that the first rank has the first and the last stage. The zero-bubble ones run backward in
halves; with one stage per rank, the interleaved one is ZB1P."""


def placement(ranks: int, virtual: int, turns: bool = False) -> tuple[int, ...]:
    """Return the rank of every stage: round-robin, or in a V, whose turns start on the rank where the last one ended.

    Args:
        ranks: the number of pipeline ranks.
        virtual: stages per rank.
        turns: True for the V.
    """
    # In a V, adjacent stages at a turn share a rank and need no message.
    there = tuple(range(ranks))
    back = there[::-1] if turns else there
    return tuple(rank for turn in range(virtual) for rank in (back if turn % 2 else there))


def schedule(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Build one of torch's schedules.

    Args:
        name: one of `SCHEDULES`, in any case.
        ranks: the number of pipeline ranks.
        microbatches: the number per step.
        virtual: stages per rank.

    Returns:
        The schedule, with the orders that torch's class of that name runs.

    Raises:
        PipelineError: there is no such schedule, or none for these ranks, stages and microbatches.
    """
    full = {known.lower(): known for known in SCHEDULES}.get(name.lower())
    if full is None:
        raise PipelineError(f"there is no schedule {name!r}. {suggestion(name, list(SCHEDULES))}")
    family = SCHEDULES[full]
    if min(ranks, microbatches, virtual) < 1:
        raise PipelineError(
            f"schedule {full} on {ranks} ranks with {virtual} stages each and {microbatches} microbatches: all three "
            f"have to be at least 1."
        )
    refusal = family.refusal(ranks, virtual, microbatches)
    if refusal is not None:
        raise PipelineError(
            f"schedule {full} can't be had on {ranks} ranks with {virtual} stages each and {microbatches} "
            f"microbatches: {refusal}."
        )
    # Torch's classes for one stage per rank run loops, without a list of actions.
    if family.ours is not None:
        orders = tuple(tuple(family.ours(rank, ranks, microbatches)) for rank in range(ranks))
    else:
        rows = _torch.order(full, ranks, virtual, microbatches)
        orders = tuple(tuple(map(Action.parse, row)) for row in rows)
    return Schedule(full, microbatches, orders)


# The kinds that compute gradients of a stage's inputs.
_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_BACKWARD)

Product = tuple[int, ActionKind, int | None]
"""Key of the result of a computation: stage, kind and microbatch.

The backward half for inputs computes the same gradients as a whole backward, and has its kind here."""


class Issued(NamedTuple):
    """An action and the rank that issues it."""

    rank: int
    action: Action


def issue(schedule: Schedule) -> list[Issued]:
    """Return all actions of a step, messages and gradient reductions included, in one order for all ranks.

    The order is that of torch's own pass over such lists. It is reimplemented because torch, given only computations,
    counts the gathers of FSDP as positions, too, and may place a receive later.

    Args:
        schedule: the computations.

    Returns:
        The actions; those of one rank are in the order in which it issues them. A receive follows its send directly.

    Raises:
        PipelineError: the orders wait for one another (a deadlock); the message says who waits for what.
    """
    issued: list[Issued] = []
    stages = schedule.stages
    # Results that are computed, and sent if another rank needs them: a send follows its computation at once.
    available: set[Product] = set()
    left = [iter(_with_reductions(schedule, rank)) for rank in range(schedule.ranks)]
    following: list[Action | None] = [next(actions, None) for actions in left]
    # The ranks take turns, each with its next action if its inputs are available. A send follows its computation, and
    # its receive comes after everything that the receiver has issued so far: any two ranks have their messages in the
    # same order, and no message waits for a later one.
    while any(action is not None for action in following):
        progress = False
        for rank, action in enumerate(following):
            if action is None or _missing_product(action, stages, available) is not None:
                continue
            issued.append(Issued(rank, action))
            for part in action.computations:
                available.add(product(part))
                issued += _messages(part, schedule)
            following[rank] = next(left[rank], None)
            progress = True
        if not progress:
            raise PipelineError(_deadlock_text(schedule, following, available))
    return issued


def runtime_actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return every rank's actions for torch's runtime, in its format "compute_comms"; raises the errors of `issue`."""
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, action in issue(schedule):
        orders[rank].append(action)
    return tuple(map(tuple, orders))


def _with_reductions(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield a rank's actions, with a reduction of a stage's gradients after its last backward."""
    through: Counter[int] = Counter()
    for action in schedule.orders[rank]:
        yield action
        for part in action.computations:
            if part.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_BACKWARD):
                through[part.stage] += 1
                if through[part.stage] == schedule.microbatches:
                    yield Action(part.stage, ActionKind.REDUCTION)


def _messages(done: Action, schedule: Schedule) -> Iterator[Issued]:
    """Yield the send and the receive of a computation's result, unless the next stage is on the same rank."""
    if done.kind == ActionKind.FORWARD:
        to, send, receive = done.stage + 1, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD
    elif done.kind in _BACKWARDS:
        to, send, receive = done.stage - 1, ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD
    else:
        return
    placement = schedule.placement
    if 0 <= to < len(placement) and placement[to] != placement[done.stage]:
        yield Issued(placement[done.stage], Action(done.stage, send, done.microbatch))
        yield Issued(placement[to], Action(to, receive, done.microbatch))


def product(action: Action) -> Product:
    """Return the key of the result of a computation."""
    # Both compute the gradients of the stage's inputs, for which the previous stage waits.
    kind = ActionKind.BACKWARD if action.kind == ActionKind.INPUT_BACKWARD else action.kind
    return action.stage, kind, action.microbatch


def required_products(action: Action, stages: int) -> tuple[Product, ...]:
    """Return the results that a computation needs.

    Args:
        action: a computation, or a reduction, which needs only results of its own rank.
        stages: the number of stages over all ranks.
    """
    stage, kind, microbatch, _ = action
    if kind == ActionKind.FORWARD:
        return ((stage - 1, ActionKind.FORWARD, microbatch),) if stage > 0 else ()
    if kind == ActionKind.WEIGHT_BACKWARD:
        return ((stage, ActionKind.BACKWARD, microbatch),)
    if kind in _BACKWARDS:
        forward = stage, ActionKind.FORWARD, microbatch
        return (forward, (stage + 1, ActionKind.BACKWARD, microbatch)) if stage < stages - 1 else (forward,)
    return ()


def _missing_product(action: Action, stages: int, available: set[Product]) -> Product | None:
    """Return a result that an action needs but that is not available yet."""
    needs = (need for part in action.computations for need in required_products(part, stages))
    return next((need for need in needs if need not in available), None)


def _deadlock_text(schedule: Schedule, following: list[Action | None], available: set[Product]) -> str:
    """Return, as text, the chain of ranks that wait for one another, up to the first repeated one."""
    # From any waiting rank, follow the rank that it waits for, until one is repeated.
    links: list[str] = []
    placement = schedule.placement
    rank = next(rank for rank, action in enumerate(following) if action is not None)
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        action = following[rank]
        assert action is not None, f"rank {rank} is through, and is waited for"
        missing = _missing_product(action, schedule.stages, available)
        assert missing is not None, f"rank {rank} waits for nothing at {action}"
        links.append(f"rank {rank} is to run {action}, which needs {Action(*missing)}")
        rank = placement[missing[0]]
    links.append(f"rank {rank} has that behind {following[rank]}")
    return (
        f"schedule {schedule.name} can't be run, because its ranks wait for one another: {'; '.join(links)}. Change "
        f"the order of one of them."
    )
