"""Candidates of a search, with the time and memory of their programs."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from autoshard.capture.joint import JointGraph
from autoshard.memory.footprint import (
    AT_REST,
    Allocation,
    AllocationKind,
    Memory,
    Source,
    changes_by_kind,
    kept_by_module,
    live_bytes,
    saved_at_peak,
)
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import GraphRules
from autoshard.planner.call_times import CallTimes
from autoshard.planner.host_updates import HostUpdate, update_seconds
from autoshard.planner.program_memory import allocations, host_bytes
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.plans.step_replay import StepReplay
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import KernelPrices
from autoshard.reshard.reductions import DeferredReduction


class ReplayedStep(NamedTuple):
    """The replay of a program.

    Attributes:
        seconds: of the step, with concurrent compute slowed down by communication.
        exposed: seconds of the step in which a device communicates and does not compute.
        calls: the times of its calls.
    """

    seconds: float
    exposed: float
    calls: CallTimes


class Footprint(NamedTuple):
    """Bytes of one device in a step.

    Attributes:
        memory: the account, with the peak.
        held: bytes at every moment, of shape `(moments,)`.
        changes: kind -> moments and bytes, from `changes_by_kind`.
        saved: bytes of the saved tensors at the peak, by the moments at which they are made.
        kept: path of a module -> bytes that a run keeps between its halves, on the device or on the host.
        lives: bytes, first moment, and first moment after the end of every allocation: shape `(allocations, 3)`.
        makers: for every allocation, the node name of the operator that makes it, or of the input that is held or whose
            gradient it is.
    """

    memory: Memory
    held: np.ndarray
    changes: dict[AllocationKind, np.ndarray]
    saved: dict[int, int]
    kept: dict[str, dict[Source, int]]
    lives: np.ndarray
    makers: tuple[str, ...]


class ProgramPricing(Protocol):
    """The graph of some decisions, and methods that make and price their programs; see `PlanningContext`."""

    @property
    def graph(self) -> JointGraph: ...

    @property
    def rules(self) -> GraphRules: ...

    @property
    def settings(self) -> Settings: ...

    @property
    def prices(self) -> KernelPrices: ...

    def program(self, flow: Flow, reduced: DeferredReduction | None = None) -> PredictedProgram: ...

    def replay(self, program: PredictedProgram, prices: KernelPrices) -> ReplayedStep: ...

    def update_seconds(self, program: PredictedProgram, hosted: Collection[str]) -> float: ...

    def host_updates(self, flow: Flow) -> list[HostUpdate]: ...

    def operation_at(self, moment: int) -> tuple[str, str, str]: ...

    def time_phase(self, phase: str) -> AbstractContextManager[None]: ...

    def describe(self, plan: CandidatePlan) -> ShardingPlan: ...


class ProgramEstimate:
    """Time and memory of the program of some decisions, each computed on first use since that takes long.

    Args:
        context: prices the program; the context of the graph of the decisions.
        flow: the graph and the decisions.
    """

    def __init__(self, context: ProgramPricing, flow: Flow) -> None:
        self.context, self._flow = context, flow
        self._program: PredictedProgram | None = None

    @cached_property
    def times(self) -> tuple[ReplayedStep, float]:
        """The replay of the step, and seconds of the optimizer's update on the device."""
        program, hosted = self._take_program(), self._flow.decisions.hosted
        return self.context.replay(program, self.context.prices), self.context.update_seconds(program, hosted)

    @cached_property
    def host_update_seconds(self) -> float:
        """Seconds of the updates on the host, after the step."""
        return update_seconds(self.context.host_updates(self._flow))

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes of one device."""
        program, context, settings = self._take_program(), self.context, self.context.settings
        with context.time_phase("account"):
            allocated = list(
                allocations(self._flow, program, settings.optimizer, settings.under_way, settings.holds_sums)
            )
            held = live_bytes(allocated, len(context.rules.operators) + 1)
            memory = Memory.of(allocated, context.operation_at)
            phases = [self._flow.graph.phase(node) for node in context.rules.operators]
            kept = kept_by_module(allocated, phases.count("forward"), settings.under_way)
            on_host = host_bytes(self._flow, program)
            for path, size in on_host.items():
                kept.setdefault(path, {})["host"] = size
            states = sum(update.bytes for update in context.host_updates(self._flow))
            moved = settings.under_way * sum(on_host.values())
            memory = replace(memory, host=moved + states, host_optimizer=states)
            lives = np.array([each[1:4] for each in allocated], dtype=np.int64).reshape(-1, 3)
            makers = tuple(map(self._maker, allocated))
            return Footprint(memory, held, changes_by_kind(allocated), saved_at_peak(allocated), kept, lives, makers)

    def _maker(self, allocation: Allocation) -> str:
        """Return the name of the node that makes an allocation; for a gradient, that of its parameter."""
        if allocation.kind in AT_REST or allocation.kind == "gradient":
            return self._inputs.get(allocation.name, "")
        operators = self.context.rules.operators
        return operators[allocation.start].name if allocation.start < len(operators) else ""

    @cached_property
    def _inputs(self) -> dict[str, str]:
        return {source.name: source.node.name for source in self.context.graph.inputs}

    def step_replay(self) -> StepReplay:
        """Return the record of the step for a plan."""
        return self.times[0].calls.step_replay(self.footprint.changes, len(self.context.rules.operators))

    def _take_program(self) -> PredictedProgram:
        # Kept from the first measurement to the second only: a program is large, and a search keeps many plans.
        program = self._program or self.context.program(self._flow, self.context.settings.left_unreduced)
        self._program = None if self._program else program
        return program


@dataclass(frozen=True, slots=True)
class CandidatePlan:
    """A solved plan.

    Attributes:
        decisions: the decisions.
        cost: seconds of the step without overlap: the sum of compute and collectives.
        lower_bound: a lower bound of the cost of every plan of the problem.
        method: the method that found it.
        estimate: time and memory of its program.
    """

    decisions: Decisions
    cost: float
    lower_bound: float
    method: str
    estimate: ProgramEstimate = field(compare=False, repr=False)

    @property
    def memory(self) -> Memory:
        """Bytes of one device."""
        return self.estimate.footprint.memory

    @property
    def held_bytes(self) -> np.ndarray:
        """Bytes of one device at every moment of the step."""
        return self.estimate.footprint.held

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of the step, with compute slowed down by communication, and of updates on the host."""
        return self.estimate.times[0].seconds + self.host_update_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the step in which a device communicates and does not compute."""
        return self.estimate.times[0].exposed

    @property
    def update_seconds(self) -> float:
        """Predicted seconds of the optimizer's update on the device, which follows the step."""
        return self.estimate.times[1]

    @property
    def host_update_seconds(self) -> float:
        """Predicted seconds of the optimizer's updates on the host, which are part of the step."""
        return self.estimate.host_update_seconds
