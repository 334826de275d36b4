"""The schedules of torch: their requirements and their orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autoshard.errors import PipelineError
from autoshard.names import suggestion
from autoshard.pipeline import _torch
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """Requirements of one schedule.

    Attributes:
        virtual: the least and the most stages per rank; None for no upper limit.
        turns: True if stages go along the ranks and back (in a V), instead of round and round.
        halves: True if backward may run in halves, the one for inputs first.
        even_rounds: True if microbatches go in rounds of equal size, each of at least as many as there are ranks.
        least: the fewest microbatches, for a number of ranks.
        ours: makes the order of one rank, for schedules whose class in torch has no list of actions; else None.
    """

    virtual: tuple[int, int | None]
    turns: bool = False
    halves: bool = False
    even_rounds: bool = False
    least: Callable[[int], int] = lambda ranks: 1
    ours: Callable[[int, int, int], Iterable[Action]] | None = None

    def refusal(self, ranks: int, virtual: int, microbatches: int) -> str | None:
        """Return the reason why there is no such schedule, with a remedy; None where there is one."""
        least, most = self.virtual
        if virtual < least or (most is not None and virtual > most):
            allowed = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
            return f"it needs {allowed} {'stage' if allowed == '1' else 'stages'} per rank, not {virtual}"
        if microbatches < self.least(ranks):
            return f"on {ranks} ranks it needs at least {self.least(ranks)} microbatches, not {microbatches}"
        rounds = max(1, microbatches // ranks)
        if self.even_rounds and microbatches % rounds:
            near = [microbatches - microbatches % ranks, microbatches + -microbatches % ranks]
            return (
                f"its {microbatches} microbatches make {rounds} rounds of at least {ranks}, one for every rank, which "
                f"are not equal; {near[0]} or {near[1]} microbatches would make equal ones"
            )
        return None


def _gpipe(rank: int, ranks: int, microbatches: int) -> Iterable[Action]:
    """Yield all forwards, then all backwards, in the same order of microbatches."""
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        yield from (Action(rank, kind, microbatch) for microbatch in range(microbatches))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterable[Action]:
    """Yield a forward per rank from here to the last, then a backward and a forward in turn."""
    ahead = min(microbatches, ranks - rank)
    yield from (Action(rank, ActionKind.FORWARD, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        yield Action(rank, ActionKind.BACKWARD, microbatch)
        if microbatch + ahead < microbatches:
            yield Action(rank, ActionKind.FORWARD, microbatch + ahead)


SCHEDULES: dict[str, ScheduleFamily] = {
    "GPipe": ScheduleFamily((1, 1), ours=_gpipe),
    "1F1B": ScheduleFamily((1, 1), least=lambda ranks: ranks, ours=_one_forward_one_backward),
    "Interleaved1F1B": ScheduleFamily((2, None), even_rounds=True),
    "LoopedBFS": ScheduleFamily((2, None)),
    "InterleavedZeroBubble": ScheduleFamily((1, None), halves=True, even_rounds=True),
    "ZBVZeroBubble": ScheduleFamily((2, 2), turns=True, halves=True),
    "DualPipeV": ScheduleFamily((2, 2), turns=True, halves=True, least=lambda ranks: 2 * ranks),
}
"""The requirements of every schedule of torch, by the name of its class without "Schedule".

GPipe and 1F1B (Rhino 6.2) have one stage per rank. The interleaved ones and LoopedBFS lay stages round the ranks, ZB-V
and DualPipeV in a V, so that the first rank holds the first and the last stage. The zero-bubble ones run backward in
halves; with one stage per rank, the interleaved one is ZB1P."""


def placement(ranks: int, virtual: int, turns: bool = False) -> tuple[int, ...]:
    """Return the rank of every stage: round and round, or in a V, where a turn starts on the rank where the last ended.

    Args:
        ranks: of the pipeline.
        virtual: stages per rank.
        turns: True for the V.
    """
    there = tuple(range(ranks))
    back = there[::-1] if turns else there
    return tuple(rank for turn in range(virtual) for rank in (back if turn % 2 else there))


def schedule(name: str, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Build one of torch's schedules.

    Args:
        name: one of `SCHEDULES`, in any case.
        ranks: of the pipeline.
        microbatches: of one step.
        virtual: stages per rank.

    Returns:
        The schedule, with the orders that torch's class of that name runs.

    Raises:
        PipelineError: there is no such schedule, or it is not made for so many ranks, stages and microbatches.
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
    if family.ours is not None:
        orders = tuple(tuple(family.ours(rank, ranks, microbatches)) for rank in range(ranks))
    else:
        rows = _torch.order(full, ranks, virtual, microbatches)
        orders = tuple(tuple(map(Action.parse, row)) for row in rows)
    return Schedule(full, microbatches, orders)
