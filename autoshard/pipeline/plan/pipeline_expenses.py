"""Expenses of a pipeline's step, averaged over its ranks: work of stages, messages, and waiting."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.pipeline.schedule.actions import Action, ActionKind
from autoshard.pipeline.schedule.costs import LINK, REDUCTION, Simulation, StageCosts
from autoshard.plans.expenses import COMPUTE, Amount, StepExpenses, Term, count_rerun
from autoshard.plans.plan_data import Collective
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.report import Fact
from autoshard.reshard.reductions import DeferredReduction
from autoshard.simulate.events import covered_seconds
from autoshard.specs.axes import MeshShape
from autoshard.units import format_bytes

SEND = "send"
"""The kind of a term for messages between stages."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of one stage.

    Attributes:
        plan: the plan for one microbatch.
        costs: the costs for one microbatch, as in the simulation.
        first, last: paths of the first and the last module whose operators it runs.
        reduced: when it reduces the gradients that become smaller by reduction.
    """

    plan: ShardingPlan
    costs: StageCosts
    first: str
    last: str
    reduced: DeferredReduction

    @property
    def exposed(self) -> float:
        """Seconds per microbatch in which a device communicates inside the stage but does not compute."""
        return self.plan.expenses().exposed if self.plan.step_replay.compute else 0.0

    @property
    def reduction_seconds(self) -> float:
        """Seconds of collectives that reduce gradients once per step, before overlap."""
        deferred = (sent.count * sent.seconds for sent in self.plan.collectives if self.is_deferred(sent))
        return sum(deferred) + self.costs.tied_seconds

    def is_deferred(self, sent: Collective) -> bool:
        """Return True if a collective of the plan runs once per step, not with every microbatch."""
        return sent.gradient and (self.reduced == "step" or sent.kind != "reduce_scatter")


@dataclass(frozen=True)
class PipelineExpenses(StepExpenses):
    """The expenses of a pipeline's step on one device.

    Seconds are the mean over the pipeline's ranks: work on one of two ranks counts half, and meanwhile the other rank
    also works, or waits in the bubble. So a module counts equally on any rank. Counts and bytes are those of one device
    of the rank that runs the module, for all microbatches.

    Attributes:
        mesh: all axes.
        axis: the name of the pipeline axis.
        stages: the stages in order.
        step: the simulated step.
        contention: as in `PipelinePlan`.
        capacities: for every rank, the bytes of one of its devices; 0 if unknown.
        order: the schedule as text.
    """

    mesh: MeshShape
    axis: str
    stages: tuple[StageWork, ...]
    step: Simulation
    contention: float
    capacities: tuple[int, ...]
    order: str

    @property
    def _ranks(self) -> int:
        return self.step.schedule.ranks

    @property
    def _runs_per_rank(self) -> float:
        """The part of a stage's microbatches that counts for one rank."""
        return self.step.schedule.microbatches / self._ranks

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def axes(self) -> tuple[str, ...]:
        return self.mesh.names

    @property
    def schedule(self) -> str:
        return self.order

    @cached_property
    def terms(self) -> dict[Term, Amount]:
        terms: defaultdict[Term, Amount] = defaultdict(Amount)
        for term, amount in (*self._stage_terms(), *self._messages(), *self._tied_gradients()):
            terms[term] += Amount(amount.count, amount.bytes, amount.seconds / self._ranks)
        return dict(terms)

    def _stage_terms(self) -> Iterator[tuple[Term, Amount]]:
        """Yield the work inside stages, in seconds of their ranks."""
        number = self.step.schedule.microbatches
        for stage in self.stages:
            for choice in stage.plan.choices:
                yield Term(COMPUTE, "", choice.phase, choice.module), Amount(number, 0, number * choice.seconds)
            for sent in stage.plan.collectives:
                count = sent.count * (1 if stage.is_deferred(sent) else number)
                amount = Amount(count, count * sent.bytes, count * sent.seconds)
                yield Term(sent.kind, sent.axis, sent.phase, sent.module), amount

    def _messages(self) -> Iterator[tuple[Term, Amount]]:
        """Yield the messages between ranks, at the module that computes what is sent."""
        for task in self.step.tasks:
            if task.stream == LINK:
                action = Action.parse(task.name)
                stage = self.stages[action.stage]
                if action.kind == ActionKind.SEND_FORWARD:
                    term, sent = Term(SEND, self.axis, "forward", stage.last), stage.costs.forward_bytes
                else:
                    term, sent = Term(SEND, self.axis, "backward", stage.first), stage.costs.backward_bytes
                yield term, Amount(1, sent, task.seconds)

    def _tied_gradients(self) -> Iterator[tuple[Term, Amount]]:
        """Yield the sums of gradients of parameters that several stages share."""
        for stage in self.stages:
            costs = stage.costs
            if costs.tied_seconds:
                others = {name for other in self.stages if other is not stage for name in other.plan.placements}
                shared = [name for name in stage.plan.placements if name in others]
                # Stages share small buffers, too.
                largest = max(shared, key=lambda name: math.prod(stage.plan.shapes[name]), default="")
                term = Term("all_reduce", self.axis, "backward", largest.rpartition(".")[0])
                yield term, Amount(1, costs.tied_bytes, costs.tied_seconds)

    @cached_property
    def exposed(self) -> float:
        between = (self._exposed_between_stages(rank) for rank in range(self._ranks))
        return self._runs_per_rank * sum(stage.exposed for stage in self.stages) + sum(between) / self._ranks

    @cached_property
    def slowdown(self) -> float:
        inside = sum(self.contention * stage.plan.step_replay.hidden for stage in self.stages)
        nominal = sum(task.seconds for task in self.step.tasks if task.stream == COMPUTE)
        busy = sum(self._busy_seconds(rank, COMPUTE) for rank in range(self._ranks))
        return self._runs_per_rank * inside + max(0.0, busy - nominal) / self._ranks

    def _exposed_between_stages(self, rank: int) -> float:
        """Return the seconds in which a rank receives messages or reduces gradients, but runs no stage."""
        receiving = self._busy_seconds(rank, COMPUTE, LINK) - self._busy_seconds(rank, COMPUTE)
        reducing = self._busy_seconds(rank, COMPUTE, LINK, REDUCTION) - self._busy_seconds(rank, COMPUTE, LINK)
        # The rest of the reduction's time is spent on copying gradients to buckets and back.
        placed = zip(self.step.schedule.placement, self.stages, strict=True)
        return receiving + min(reducing, sum(stage.reduction_seconds for place, stage in placed if place == rank))

    def _busy_seconds(self, rank: int, *streams: str) -> float:
        """Return the seconds in which a rank has tasks on some streams; a message counts for its receiver."""
        tasks = zip(self.step.tasks, self.step.starts, self.step.ends, strict=True)
        return covered_seconds(
            (start, end) for task, start, end in tasks if task.ranks[-1] == rank and task.stream in streams
        )

    @cached_property
    def bubble(self) -> float:
        working = (self._busy_seconds(rank, COMPUTE, LINK, REDUCTION) for rank in range(self._ranks))
        return self.step.seconds - sum(working) / self._ranks

    @property
    def rerun(self) -> str:
        return count_rerun([stage.plan for stage in self.stages])

    @property
    def _tightest(self) -> int:
        """The rank with the largest peak."""
        return max(range(self._ranks), key=self.step.peaks.__getitem__)

    @property
    def peak(self) -> int:
        return self.step.peaks[self._tightest]

    @property
    def capacity(self) -> int:
        return self.capacities[self._tightest] if self.capacities else 0

    @property
    def memory(self) -> dict[str, int]:
        return {f"rank {rank}": peak for rank, peak in enumerate(self.step.peaks)}

    @property
    def held(self) -> dict[str, dict[str, int]]:
        return {}

    @property
    def title(self) -> str:
        return f"Expenses of a step on one device, the mean of the ranks along {self.axis}"

    def memory_fact(self) -> Fact:
        peaks = ", ".join(f"{rank} {format_bytes(peak)}" for rank, peak in self.memory.items())
        of = f" of {format_bytes(self.capacity)}" if self.capacity else ""
        return Fact("memory", f"peak {format_bytes(self.peak)}{of}", peaks)
