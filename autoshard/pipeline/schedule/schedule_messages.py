"""A schedule with what passes between ranks: where every send and receive stands among the computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_BACKWARD)


Product = tuple[int, ActionKind, int | None]
"""What a computation makes, as others need it: by stage, kind and microbatch. The half of backward for inputs makes the
gradients that a whole one makes, and goes by its kind."""


class Issued(NamedTuple):
    """An action and the rank that issues it."""

    rank: int
    action: Action


def issue(schedule: Schedule) -> list[Issued]:
    """All actions of a step, with messages and reductions of gradients, in one order that every rank can keep to.

    The ranks take turns, each with its next action where what it needs is there. A send stands behind what it sends,
    its receive at the end of what the receiver has issued by then; so any two ranks have their messages in the same
    order, and none waits for one behind it. It is the order of torch's own pass over such lists. Given computations
    alone, torch's runtime counts places for the gathers of FSDP too, and may put a receive somewhat later.

    Args:
        schedule: the computations.

    Returns:
        The actions; those of one rank are in the order in which it issues them. A receive comes right after its send.

    Raises:
        PipelineError: the orders wait for one another (a deadlock); the message says who waits for what.
    """
    issued: list[Issued] = []
    stages = schedule.stages
    there: set[Product] = set()  # what others can use: computed, and on its way where it is not on their rank
    left = [iter(_with_reductions(schedule, rank)) for rank in range(schedule.ranks)]
    following: list[Action | None] = [next(actions, None) for actions in left]
    while any(action is not None for action in following):
        progress = False
        for rank, action in enumerate(following):
            if action is None or _missing_product(action, stages, there) is not None:
                continue
            issued.append(Issued(rank, action))
            for part in action.computations:
                there.add(product(part))
                issued += _messages(part, schedule)
            following[rank] = next(left[rank], None)
            progress = True
        if not progress:
            raise PipelineError(_deadlock_text(schedule, following, there))
    return issued


def runtime_actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """For every rank what torch's runtime runs, in its format "compute_comms"; raises what `issue` does."""
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, action in issue(schedule):
        orders[rank].append(action)
    return tuple(map(tuple, orders))


def _with_reductions(schedule: Schedule, rank: int) -> Iterator[Action]:
    """A rank's actions, the gradients of a stage reduced as soon as its last microbatch is through."""
    through: Counter[int] = Counter()
    for action in schedule.orders[rank]:
        yield action
        for part in action.computations:
            if part.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_BACKWARD):
                through[part.stage] += 1
                if through[part.stage] == schedule.microbatches:
                    yield Action(part.stage, ActionKind.REDUCE)


def _messages(done: Action, schedule: Schedule) -> Iterator[Issued]:
    """The send and the receive of what a computation makes; none where the next stage is on the same rank."""
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
    """What a computation makes."""
    kind = ActionKind.BACKWARD if action.kind == ActionKind.INPUT_BACKWARD else action.kind
    return action.stage, kind, action.microbatch


def required_products(action: Action, stages: int) -> tuple[Product, ...]:
    """What a computation needs of others.

    Args:
        action: a computation, or a reduction, which needs nothing that its rank has not done before it.
        stages: number of stages over all ranks.
    """
    stage, kind, microbatch, _ = action
    if kind == ActionKind.FORWARD:
        return ((stage - 1, ActionKind.FORWARD, microbatch),) if stage > 0 else ()
    if kind == ActionKind.WEIGHT_BACKWARD:
        return ((stage, ActionKind.BACKWARD, microbatch),)
    if kind in _BACKWARDS:
        own = stage, ActionKind.FORWARD, microbatch
        return (own, (stage + 1, ActionKind.BACKWARD, microbatch)) if stage < stages - 1 else (own,)
    return ()


def _missing_product(action: Action, stages: int, there: set[Product]) -> Product | None:
    """What an action needs and is not there yet."""
    for part in action.computations:
        for need in required_products(part, stages):
            if need not in there:
                return need
    return None


def _deadlock_text(schedule: Schedule, following: list[Action | None], there: set[Product]) -> str:
    """Who waits for whom: the chain from any rank that waits, until it comes back to a rank of its own."""
    said: list[str] = []
    placement = schedule.placement
    rank = next(rank for rank, action in enumerate(following) if action is not None)
    seen: set[int] = set()
    while rank not in seen:
        seen.add(rank)
        action = following[rank]
        assert action is not None, f"rank {rank} is through, and is waited for"
        missing = _missing_product(action, schedule.stages, there)
        assert missing is not None, f"rank {rank} waits for nothing at {action}"
        said.append(f"rank {rank} is to run {action}, which needs {Action(*missing)}")
        rank = placement[missing[0]]
    said.append(f"rank {rank} has that behind {following[rank]}")
    return (
        f"schedule {schedule.name} can't be run, because its ranks wait for one another: {'; '.join(said)}. Change the "
        f"order of one of them."
    )
