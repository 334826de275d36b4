"""A schedule with its messages: the place of every send and receive among the computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT_BACKWARD)

Product = tuple[int, ActionKind, int | None]
"""Key of the result of a computation: stage, kind and microbatch. The half of backward for inputs makes the same
gradients as a whole backward, and has its kind here."""


class Issued(NamedTuple):
    """An action and the rank that issues it."""

    rank: int
    action: Action


def issue(schedule: Schedule) -> list[Issued]:
    """Return all actions of a step, messages and reductions of gradients included, in one order for all ranks.

    This is the order of torch's own pass over such lists. It is repeated here because torch, given computations alone,
    counts the gathers of FSDP as places too, and may put a receive later.

    Args:
        schedule: the computations.

    Returns:
        The actions; those of one rank are in the order in which it issues them. A receive follows its send directly.

    Raises:
        PipelineError: the orders wait for one another (a deadlock); the message says who waits for what.
    """
    issued: list[Issued] = []
    stages = schedule.stages
    available: set[Product] = set()  # computed, and sent where another rank needs them
    left = [iter(_with_reductions(schedule, rank)) for rank in range(schedule.ranks)]
    following: list[Action | None] = [next(actions, None) for actions in left]
    # The ranks take turns, each with its next action if its inputs are available. A send follows its computation, and
    # its receive comes behind everything that the receiver has issued so far: any two ranks have their messages in the
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
    """Return the actions of every rank for torch's runtime, in its format "compute_comms"; raises as `issue` does."""
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for rank, action in issue(schedule):
        orders[rank].append(action)
    return tuple(map(tuple, orders))


def _with_reductions(schedule: Schedule, rank: int) -> Iterator[Action]:
    """Yield a rank's actions, with a reduction of the gradients of a stage behind its last backward."""
    through: Counter[int] = Counter()
    for action in schedule.orders[rank]:
        yield action
        for part in action.computations:
            if part.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_BACKWARD):
                through[part.stage] += 1
                if through[part.stage] == schedule.microbatches:
                    yield Action(part.stage, ActionKind.REDUCE)


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
    kind = ActionKind.BACKWARD if action.kind == ActionKind.INPUT_BACKWARD else action.kind
    return action.stage, kind, action.microbatch


def required_products(action: Action, stages: int) -> tuple[Product, ...]:
    """Return the results that a computation needs.

    Args:
        action: a computation, or a reduction, which needs only results of its own rank.
        stages: number of stages over all ranks.
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
    """Return a result that an action needs and that is not available yet."""
    needs = (need for part in action.computations for need in required_products(part, stages))
    return next((need for need in needs if need not in available), None)


def _deadlock_text(schedule: Schedule, following: list[Action | None], available: set[Product]) -> str:
    """Return the chain of ranks that wait for one another, up to the first repeated one, as a text."""
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
