"""How long a step takes under some decisions: its operations on streams, issued as the program issues them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import fx

from autoshard.patterns.graph import Use, Value, operand_nodes
from autoshard.planner.account import LOCAL_STEPS, Account, Leg
from autoshard.reshard.path import Step
from autoshard.simulate.events import COMPUTE, Operation, Timeline, link_stream, replay


def timeline(account: Account) -> Timeline:
    """The step on a stream of compute and one of communication per link: collectives run where the program starts them.

    A collective starts when all compute issued before it is done, which is when its data is there, but for what lies
    ready: the gather of a parameter, or of a saved activation, starts where the one before it in the same half is
    first read (`reshard.overlap.gather_ahead`), and runs behind the compute in between.
    """
    return _Schedule(account).run()


def issued(account: Account) -> Iterator[tuple[int, Leg, Sequence[Step]]]:
    """The steps of every reshard, and the operator before which the program issues them."""
    before: dict[str, int] = {}  # phase -> where what was gathered last is first read
    for leg in account.legs:
        if _ready(account, leg) and leg.path.steps[0].kind == "all_gather":
            yield before.get(leg.phase, leg.position), leg, leg.path.steps[:1]
            yield leg.position, leg, leg.path.steps[1:]
            before[leg.phase] = leg.position
        else:
            yield leg.position, leg, leg.path.steps


def _ready(account: Account, leg: Leg) -> bool:
    """Whether what a reshard reads is there when its half begins."""
    node = leg.value.node
    return leg.source == leg.value.name and (node.op == "placeholder" or account.flow.graph.phase(node) != leg.phase)


def step_seconds(account: Account) -> float:
    """Predicted seconds of a step: its timeline, and what compute loses to the communication beside it."""
    return timeline(account).disturbed(account.tables.cost.cluster.contention)


class _Schedule:
    """One pass over an account that issues operations."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.operations: list[Operation] = []
        self.made: dict[str, int] = {}  # key of a value or copy -> the operation that makes it
        self.computed: int | None = None  # the compute issued last

    def run(self) -> Timeline:
        waiting: dict[int, list[tuple[Leg, Sequence[Step]]]] = defaultdict(list)
        for position, leg, steps in issued(self.account):
            waiting[position].append((leg, steps))
        for position, node in enumerate((*self.account.rules.operators, None)):
            for leg, steps in waiting.get(position, ()):
                self._reshard(leg, steps)
            if node is not None:
                self._compute(node)
        return replay(self.operations)

    def _reshard(self, leg: Leg, steps: Sequence[Step]) -> None:
        for step in steps:
            source = self.made.get(leg.key, self.made.get(leg.source))
            stream = COMPUTE if step.kind in LOCAL_STEPS else self._link(step.axis)
            self._issue(f"{step.kind} {leg.key}", stream, step.seconds, source)
            self.made[leg.key] = len(self.operations) - 1

    def _compute(self, node: fx.Node) -> None:
        keys = (self.account.read[Use(node, operand)] for operand, _ in enumerate(operand_nodes(node)))
        needs = (self.made[key] for key in keys if key in self.made)
        self._issue(node.name, COMPUTE, self.account.seconds(node), *needs)
        for index in range(len(self.account.rules.calls[node].results)):
            self.made[Value(node, index).name] = len(self.operations) - 1

    def _link(self, axis: int) -> str:
        return link_stream(self.account.tables.cost.spans_hosts(axis))

    def _issue(self, name: str, stream: str, seconds: float, *needs: int | None) -> None:
        known = {need for need in (*needs, self.computed) if need is not None}
        self.operations.append(Operation(name, stream, seconds, tuple(sorted(known))))
        if stream == COMPUTE:
            self.computed = len(self.operations) - 1
