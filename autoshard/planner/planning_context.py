"""The graph, rules, prices and tables of a plan, and the account of decisions."""

from __future__ import annotations

import contextlib
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.footprint import Memory, live_bytes
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.account import StepAccount
from autoshard.planner.allocations import allocations
from autoshard.planner.candidate_plan import CandidatePlan, ProgramEstimate
from autoshard.planner.planning_problem import BuiltProblem, Constraints, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.schedule import OperatorPrices, reduction_timeline, timeline
from autoshard.planner.search_progress import Progress
from autoshard.planner.solve_request import BlockSolution, SolveRequest
from autoshard.planner.solving import SolveOptions, SolveResult, is_large, solve_problem
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.planner.tiling import Layer, Tiling, layers_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.predicted_program import PredictedProgram, predict_program
from autoshard.program.program_replay import KernelPrices
from autoshard.program.recordings import LocalPrograms
from autoshard.reshard.deferred_reductions import DeferredReduction
from autoshard.reshard.path import Resharder
from autoshard.solver.eliminate import WidthError
from autoshard.specs.axes import MeshShape
from autoshard.version import __version__

_MAX_ACCOUNTS = 3  # that are kept: the plan that is handed back is most often one of the last


class PlanningContext(ABC):
    """The graph, the prices and the tables of a plan; it solves problems of some mesh axes and evaluates decisions.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
        cluster: what the devices and links can do.
        wishes: pinned placements, and how inputs and outputs are to lie.
        settings: limits and method.
        progress: told how the search goes.
        like: the planner of another graph on the same mesh and cluster: what it has worked out for equal operators and
            tensors is not worked out again.

    Attributes:
        unlimited: what was found without the memory limit, once that was looked for.
        rungs: plans that were made on the way to one within a limit, by what was asked of them: they do not depend on
            the limit, and serve a planner of the same with another one.
    """

    def __init__(
        self,
        graph: JointGraph,
        mesh: MeshShape,
        cluster: Cluster,
        wishes: Constraints,
        settings: Settings,
        progress: Callable[[Progress], None] | None = None,
        like: PlanningContext | None = None,
    ) -> None:
        self.timings: dict[str, float] = {}
        self._running: set[str] = set()  # phases that are being timed
        self.unlimited: CandidatePlan | None = None
        self.plan_cache: dict[Hashable, CandidatePlan] = {}
        self._fastest: CandidatePlan | None = None  # of those without a limit, once they were looked for
        self.graph = graph
        self.mesh = mesh
        self.cluster = cluster
        self.constraints = replace(wishes, optimizer=settings.optimizer)
        self.settings = settings
        self.progress = progress
        self.start = time.monotonic()
        self.deadline = self.start + settings.time_limit
        self._builders: dict[int, ProblemBuilder] = {}  # of wishes, which they keep alive, by identity
        self._tilings: dict[int, tuple[BuiltProblem, Tiling | None]] = {}  # of problems at no prices, the same way
        self._candidates: list[CandidatePlan] = []  # every plan that was looked at
        self._accounts: deque[StepAccount] = deque(maxlen=_MAX_ACCOUNTS)  # of the decisions looked at last
        self.interrupted = False  # whether somebody stopped the search, and got the best plan met until then
        self.best: CandidatePlan | None = None  # the cheapest plan met that keeps the limit
        self._like = like
        if like is None:
            self.cost = CostModel(cluster, mesh)
            self.resharder = Resharder(mesh, self.cost.collective, self.gradient_price, wishes.shared)
            self.programs = LocalPrograms(graph, mesh)
            self.tables = StrategyTables(self.cost, wishes.shared)
            self.prices = OperatorPrices(self.tables)
        else:
            self.cost, self.resharder, self.programs = like.cost, like.resharder, like.programs
            self.tables, self.prices = like.tables, like.prices
        with self.time_phase("patterns"):
            self.rules = GraphRules(graph, mesh)
            if like is not None:
                self.rules.reuse_from(like.rules)

    def forget(self) -> None:
        """Drop what was found: what serves planners like this one stays."""
        self.unlimited = self._fastest = self.best = None
        self.plan_cache, self._builders, self._tilings, self._candidates = {}, {}, {}, []
        self._accounts.clear()
        if "builder" in self.__dict__:
            self.builder.forget()

    def gradient_price(self, kind: str, bytes: int, axis: int) -> float:
        """What a collective counts by which a gradient goes to its optimizer."""
        return self.cost.gradient_collective(kind, bytes, axis) / self.settings.runs_per_reduction

    def warn_of_interruption(self, cost: float) -> None:
        """Says that a plan of so many seconds is what there was when somebody stopped the search."""
        self.interrupted = True
        if self._like is not None:
            self._like.interrupted = True
        warnings.warn(
            f"the search was interrupted after {time.monotonic() - self.start:.1f} s: this is the best plan met "
            f"until then, {cost:.6g} s per step. Plan again for a better one.",
            stacklevel=3,
        )

    @abstractmethod
    def solve(
        self,
        wishes: Constraints,
        *,
        method: str | None = None,
        limit: float | None = None,
        prices: np.ndarray | None = None,
        hiding: OverlapDiscount | None = None,
        work: int | None = None,
    ) -> CandidatePlan:
        """Return the best plan that is found under some constraints.

        Args:
            wishes: pinned and forced placements.
            method: one of the solver's; by default that of the settings.
            limit: bytes that what operators and parameters hold may reach at any moment.
            prices: of memory, in seconds per byte at every moment; they decide, and are no part of the cost found.
            hiding: what collectives of a kind count; it decides, and is no part of the cost found.
            work: of the solver on a single problem, in its units; by default what the settings say.

        Raises:
            PlanError: the method found no decisions in the time there is, or can't solve this problem.
            BudgetError: the same under a limit.
            KeyboardInterrupt: somebody interrupted the search; `best` is then the cheapest plan met.
        """

    def _update_best(self, found: CandidatePlan) -> None:
        """Notes the cheapest plan that keeps the limit, in case the search is interrupted."""
        limit = self.settings.memory_limit
        kept = limit is None or found.memory.peak <= limit
        if kept and (self.best is None or found.cost < self.best.cost):
            bound = found.lower_bound if self.best is None else self.best.lower_bound
            self.best = replace(found, lower_bound=min(bound, found.cost))

    def program(self, flow: Flow, reduced: DeferredReduction | None = None) -> PredictedProgram:
        """The calls of the program that some decisions stand for; `reduced` as for `predict_program`."""
        with self.time_phase("account"):
            return predict_program(flow, self.resharder, self.programs, reduced)

    def replay(self, program: PredictedProgram, prices: KernelPrices) -> tuple[float, float]:
        """Seconds of a step of a program, and those of them in which a device communicates and does not compute."""
        with self.time_phase("schedule"):
            replayed, later = timeline(program, prices), reduction_timeline(program, prices)
            steps, contention = self.settings.gradient_steps, self.cluster.contention
            seconds = replayed.seconds_with_contention(contention) + later.seconds_with_contention(contention) / steps
            return seconds, replayed.exposed + later.exposed / steps

    def update_seconds(self, program: PredictedProgram) -> float:
        """Seconds in which the optimizer updates what a device holds, by the bytes that it moves."""
        moved = 0
        for source in self.graph.inputs:
            gradient = program.outputs.get(("gradient", source.name))
            if source.kind == "parameter" and gradient is not None:
                part, shape = program.inputs[source.node.name].meta["val"], Value(source.node).meta.shape
                arrived = gradient.meta["val"].numel() * gradient.meta["val"].element_size()
                moved += self.settings.optimizer.moved_bytes(shape, tuple(part.shape), part.element_size(), arrived)
        return self.cost.compute(0.0, moved, torch.float32) if moved else 0.0

    def evaluate(self, decisions: Decisions, cost: float, lower_bound: float, method: str) -> CandidatePlan:
        """Some decisions with what their program does: how long its step takes, what a device holds under them."""
        for known in self._candidates:
            if known.decisions == decisions:
                return replace(known, cost=cost, lower_bound=lower_bound, method=method)
        flow = Flow(self.rules, decisions, self.mesh)

        def make_program() -> PredictedProgram:
            return self.program(flow, self.settings.left_unreduced)

        def measure_times(program: PredictedProgram) -> tuple[float, float, float]:
            return (*self.replay(program, self.prices), self.update_seconds(program))

        def measure_memory(program: PredictedProgram) -> tuple[Memory, np.ndarray]:
            with self.time_phase("account"):
                allocated = list(allocations(flow, program, self.settings.optimizer, self.settings.under_way))
                return Memory.of(allocated, self.operation_at), live_bytes(allocated, len(self.rules.operators) + 1)

        self._candidates.append(
            CandidatePlan(
                decisions, cost, lower_bound, method, ProgramEstimate(make_program, measure_times, measure_memory)
            )
        )
        return self._candidates[-1]

    def operation_at(self, moment: int) -> tuple[str, str, str]:
        """What runs at a moment of the step: phase, path of the module, operator."""
        if moment >= len(self.rules.operators):
            return "optimizer", "", "optimizer's step"
        node = self.rules.operators[moment]
        return self.graph.phase(node), self.graph.module_path(node), str(self.rules.calls[node].op)

    def solve_block(self, ask: SolveRequest, free: frozenset[int], current: Decisions | None) -> BlockSolution:
        """The best that is found with the mesh axes in `free` open, while all else stays as in `current`.

        Raises:
            PlanError, BudgetError: as `solve`.
        """
        with self.time_phase("problem"):
            built = ask.builder.build(free, current, ask.prices, ask.discount, ask.reuse)
            if ask.limit is not None:
                built = replace(built, problem=replace(built.problem, limit=ask.limit))
            tied = ask.method == "auto" and ask.limit is None and is_large(built.problem)
            tiling = self._tiling(built) if tied else None
        with self.time_phase("solve"):
            answer = self._solve_built(ask, built, tiling, proof=len(free) == len(self.axes))
        if not answer.assignment:
            kind = PlanError if ask.limit is None else BudgetError
            raise kind(
                f'method="{ask.method}" found no plan on mesh {self.mesh} within time_limit='
                f'{self.settings.time_limit:g} s ({answer.status}): allow more time, or use method="auto".'
            )
        cost = answer.cost
        if ask.prices is not None or ask.discount is not None:
            with self.time_phase("problem"):
                cost = ask.builder.build(free, current, reuse=ask.reuse).problem.cost(answer.assignment)
        decisions = built.decode(answer.assignment)
        return BlockSolution(decisions, answer.cost, cost, answer.lower_bound, answer.method, answer.interrupted)

    def _tiling(self, built: BuiltProblem) -> Tiling | None:
        """Which variables of a problem repeat others; prices change nothing about that."""
        plain = built.plain
        if id(plain) not in self._tilings:
            self._tilings[id(plain)] = plain, Tiling.of(plain, self.layers)
        return self._tilings[id(plain)][1]

    def _solve_built(
        self, ask: SolveRequest, built: BuiltProblem, tiling: Tiling | None, *, proof: bool
    ) -> SolveResult:
        """What the solver says; `proof`: whether a bound is a bound of all, and worth an effort."""
        plain = ask.prices is None and ask.discount is None
        search = SolveOptions(
            ask.method,
            self.deadline,
            proof=proof and plain,
            priced=ask.prices is not None,
            fast=self.settings.effort == "fast",
            proposal=ask.discount is not None,
            work_limit=ask.work,
            report=self.report,
        )
        try:
            return solve_problem(built, tiling, search)
        except WidthError as error:
            raise PlanError(
                f'method="eliminate" can not plan this model on mesh {self.mesh}: {error}. Use method="auto", '
                "which eliminates where that is possible and searches where it is not."
            ) from error

    def report(self, phase: str, cost: float, bound: float) -> None:
        """Tells whoever follows the search what it does, the least cost known, and the bound, in seconds."""
        if self.progress is not None:
            self.progress(Progress(phase, cost, bound, time.monotonic() - self.start))

    @cached_property
    def builder(self) -> ProblemBuilder:
        """Makes the problems of the wishes asked for; those of others share its tables."""
        if self._like is not None:
            return self._like.builder.for_graph(self.rules, self.constraints)
        return ProblemBuilder(self.rules, self.tables, self.resharder, self.constraints)

    @cached_property
    def layers(self) -> dict[str, tuple[Layer, int]]:
        """Layer and place there of every operator in a repeated layer."""
        return layers_of(self.rules)

    @property
    def axes(self) -> list[int]:
        """The mesh axes that there is something to decide for."""
        return [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]

    @property
    def _bound(self) -> float:
        """A lower bound of what other wishes or prices find: that of the problem without a limit, if it was solved."""
        return self._trivial_bound if self.unlimited is None else self.unlimited.lower_bound

    @cached_property
    def _trivial_bound(self) -> float:
        """A lower bound that needs no search: every operator at its cheapest, every reshard free."""
        total = 0.0
        for node in self.rules.operators:
            rule, call = self.rules.rules[node], self.rules.calls[node]
            total += float(self.tables.seconds(call, rule, self.tables.options(rule), self.rules.zeros[node]).min())
        return total

    # Account

    def account(self, decisions: Decisions) -> StepAccount:
        """The step that some decisions stand for."""
        for known in self._accounts:
            if known.flow.decisions is decisions:
                return known
        with self.time_phase("account"):
            flow = Flow(self.rules, decisions, self.mesh)
            self._accounts.append(StepAccount(flow, self.tables, self.resharder))
        return self._accounts[-1]

    def describe(self, found: CandidatePlan) -> ShardingPlan:
        """The plan that was found, with what it does and holds."""
        account = self.account(found.decisions)
        rest = found.decisions.rest
        by_kind: dict[str, dict[str, tuple[Placement, ...]]] = {}
        for source in self.graph.inputs:
            by_kind.setdefault(source.kind, {})[source.name] = rest[source.node.name].placements
        held = {**by_kind.get("parameter", {}), **by_kind.get("buffer", {})}
        aliases = {name: placements for first, placements in held.items() for name in self.graph.aliases[first]}
        shapes = {
            name: Value(source.node).meta.shape
            for source in self.graph.inputs
            if source.kind in ("parameter", "buffer")
            for name in self.graph.aliases[source.name]
        }
        return ShardingPlan(
            mesh=self.mesh,
            placements=aliases,
            input_placements=by_kind.get("input", {}),
            output_placements={name: spec.placements for name, spec in found.decisions.outputs.items()},
            shapes=shapes,
            step_seconds=found.step_seconds,
            update_seconds=found.update_seconds,
            memory=found.memory,
            device_memory=self.cost.cluster.device.memory,
            collectives=account.collectives(),
            cost=found.cost,
            lower_bound=found.lower_bound,
            method=found.method,
            timings=dict(self.timings),
            fingerprint=self.graph.fingerprint,
            cluster=self.cluster.name,
            versions={"autoshard": __version__, "torch": torch.__version__},
            decisions=found.decisions.to_data(),
            choices=tuple(account.decisions()),
            gathered=dict(account.gathered_parameters()),
            recomputed=self.graph.recomputed,
        )

    @contextlib.contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Adds what is done to a phase; what belongs to it twice counts once."""
        outermost, start = phase not in self._running, time.perf_counter()
        self._running.add(phase)
        try:
            yield
        finally:
            if outermost:
                self._running.remove(phase)
                self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - start
