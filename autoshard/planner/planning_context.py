"""The graph, rules, prices and tables of a plan; problems over some mesh axes; programs of decisions."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Placement

from autoshard.capture.capture_errors import node_line
from autoshard.capture.joint import JointGraph
from autoshard.capture.recomputation import graph_of_plan
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError, PlanError, warn_caller
from autoshard.memory.footprint import SavedTensors
from autoshard.names import group_names
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions, Flow, StrategySpecs
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.account import OperatorPrices, StepAccount, reduction_timeline, step_calls
from autoshard.planner.backward_sources import backward_sources
from autoshard.planner.boundary_specs import row_outputs
from autoshard.planner.call_times import CallTimes
from autoshard.planner.candidate_plan import CandidatePlan, ProgramEstimate, ReplayedStep
from autoshard.planner.host_updates import HostUpdate, host_updates
from autoshard.planner.planning_problem import BuiltProblem, Constraints, OverlapDiscount
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.planner.progress_line import Progress
from autoshard.planner.solve_request import BlockSolution, SolveRequest
from autoshard.planner.solving import SolveOptions, is_large, solve_problem
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.planner.tiling import Layer, Tiling, layers_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.predicted_program import PredictedProgram, predict_program
from autoshard.program.program_replay import KernelPrices
from autoshard.program.walk import LocalPrograms
from autoshard.reshard.path import Resharder
from autoshard.reshard.reductions import DeferredReduction
from autoshard.simulate.events import replay
from autoshard.solver.eliminate import WidthError
from autoshard.solver.solver_budget import Budget
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.version import __version__

_MAX_ACCOUNTS = 3  # cached accounts: the final plan is usually one of the last candidates


class PlanningContext(ABC):
    """The graph, the prices and the tables of a plan.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
        cluster: the devices and links.
        constraints: pinned placements, and the specs of inputs and outputs.
        settings: limits and method.
        progress: receives reports about the search.
        like: the planner of another graph on the same mesh and cluster, whose tables of equal operators and tensors
            are shared.

    Attributes:
        unlimited: the plan without a memory limit, once it was solved.
        unlimited_seconds: seconds of the fastest known step without a limit; infinite if none is known.
        best: the cheapest known plan that fits the limit.
        interrupted: True if the search was interrupted and returned the best known plan.
        proposes: True if a good assignment is enough, since plans are judged by their accounts.
        met: plans found by the search for a memory limit. A planner of the same graph with another limit reuses them.
    """

    proposes = False

    def __init__(
        self,
        graph: JointGraph,
        mesh: MeshShape,
        cluster: Cluster,
        constraints: Constraints,
        settings: Settings,
        progress: Callable[[Progress], None] | None = None,
        like: PlanningContext | None = None,
    ) -> None:
        self.timings: dict[str, float] = {}
        self._running: set[str] = set()  # phases that are being timed
        self.graph = graph
        self.mesh = mesh
        self.cluster = cluster
        self.constraints = replace(constraints, optimizer=settings.optimizer)
        self.settings = settings
        self.progress = progress
        self.start = time.monotonic()
        self.budget = Budget.of_seconds(settings.time_limit)
        self.interrupted = False
        self._accounts: deque[StepAccount] = deque(maxlen=_MAX_ACCOUNTS)
        self._like = like
        self._forget_results()
        if like is None:
            self.cost = CostModel(cluster, mesh)
            self.resharder = Resharder(mesh, self.cost.collective, self.gradient_price, constraints.shared)
            self.programs, self.specs = LocalPrograms(graph, mesh), StrategySpecs(mesh)
            self.tables = StrategyTables(self.cost, constraints.shared)
            self.prices = OperatorPrices(self.tables)
        else:
            self.cost, self.resharder = like.cost, like.resharder
            self.programs, self.specs = like.programs, like.specs
            self.tables, self.prices = like.tables, like.prices
        with self.time_phase("patterns"):
            self.rules = GraphRules(graph, mesh)
            if like is not None:
                self.rules.reuse_from(like.rules)  # tables are found by the identity of rules and calls
            if constraints.row_axes:
                rows = row_outputs(self.rules, mesh, constraints.row_axes)
                self.constraints = replace(self.constraints, outputs={**rows, **constraints.outputs})

    def _forget_results(self) -> None:
        self.unlimited: CandidatePlan | None = None
        self.unlimited_seconds = math.inf
        self.best: CandidatePlan | None = None
        self.met: list[CandidatePlan] = []
        self._fastest: CandidatePlan | None = None  # the fastest plan without a limit, once it was searched for
        # By the identity of constraints, and of problems without prices; the values keep the keys' objects alive.
        self._builders: dict[int, ProblemBuilder] = {}
        self._tilings: dict[int, tuple[BuiltProblem, Tiling | None]] = {}
        self._candidates: list[CandidatePlan] = []
        self._accounts.clear()

    def forget(self) -> None:
        """Drop the results of searches, which hold much memory; keep the tables that serve other planners."""
        self._forget_results()
        # Accessing the `cached_property` would make a builder only to forget its problems.
        if "builder" in self.__dict__:
            self.builder.forget()

    def gradient_price(self, kind: str, bytes: int, axis: int) -> float:
        """Return the seconds of a collective that reduces a gradient, for one run of the step."""
        return self.cost.gradient_collective(kind, bytes, axis) / self.settings.runs_per_reduction

    @property
    def price_key(self) -> tuple[SharedAxis | None, Cluster, Settings]:
        """All that the prices of a problem depend on besides its graph."""
        return self.constraints.shared, self.cluster, self.settings

    @property
    def axes(self) -> list[int]:
        """The mesh axes with more than one device."""
        return [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]

    @cached_property
    def layers(self) -> dict[str, tuple[Layer, int]]:
        """Name of every operator in a repeated layer -> the layer, and the operator's place in it."""
        return layers_of(self.rules)

    # Solving

    def solve(
        self,
        constraints: Constraints,
        *,
        method: str | None = None,
        limit: float | None = None,
        prices: np.ndarray | None = None,
        discount: OverlapDiscount | None = None,
        work: int | None = None,
    ) -> CandidatePlan:
        """Return the best plan found under some constraints.

        Prices and discounts guide the decisions; they are not part of the plan's cost.

        Args:
            constraints: pinned and forced placements.
            method: a method of the solver; by default that of the settings.
            limit: bytes that operators and parameters may hold at any moment.
            prices: seconds per byte of memory at every moment.
            discount: the price of collectives of a kind that compute hides.
            work: the solver's work limit on a single problem; by default that of the settings.

        Raises:
            PlanError: the method found no decisions within the time limit, or can't solve this problem.
            BudgetError: the same under a limit.
            KeyboardInterrupt: the search was interrupted; `best` is the cheapest known plan.
        """
        builder = self.builder_for(constraints)
        method = method or ("auto" if self.settings.method == "force" else self.settings.method)
        request = SolveRequest(builder, method, limit, prices, discount, work or self.settings.work_limit)
        solved = self._solve_all_axes(request)
        bound = solved.lower_bound
        # Solving axes in turn gives no bound of the whole problem.
        if len(self.axes) > 2:
            bound = min(bound if np.isfinite(bound) else self._bound, solved.cost)
        plan = self.evaluate(solved.decisions, solved.cost, bound, solved.method)
        self._update_best(plan)
        # An interrupted solver returns its best result; the planner ends the search.
        if solved.interrupted:
            raise KeyboardInterrupt
        return plan

    def builder_for(self, constraints: Constraints) -> ProblemBuilder:
        """Return the builder of problems under some constraints, cached by their identity."""
        return self._builders.setdefault(id(constraints), self.builder.with_constraints(constraints))

    @cached_property
    def certain(self) -> Constraints:
        """The constraints of problems that count only the memory that every program holds."""
        return replace(self.constraints, bounding=True)

    def try_solve(self, constraints: Constraints, **options: Any) -> CandidatePlan | None:
        """Return the result of `solve`; None if no time is left, or the method finds nothing in it."""
        if self.budget.is_over:
            return None
        try:
            return self.solve(constraints, **options)
        except PlanError:
            return None

    @abstractmethod
    def _solve_all_axes(self, request: SolveRequest) -> BlockSolution:
        """Return the best decisions for all mesh axes."""

    def solve_block(self, request: SolveRequest, free: frozenset[int], current: Decisions | None) -> BlockSolution:
        """Return the best decisions on the mesh axes in `free`, with all others fixed as in `current`.

        Raises:
            PlanError, BudgetError: as for `solve`.
        """
        with self.time_phase("problem"):
            built = request.builder.build(free, current, request.prices, request.discount, request.reuse)
            if request.limit is not None:
                built = replace(built, problem=replace(built.problem, limit=request.limit))
            tied = request.method == "auto" and request.limit is None and is_large(built.problem)
            tiling = self.tiling(built) if tied else None
        with self.time_phase("solve"):
            # A bound over some axes is no bound of the whole problem, so not worth an effort.
            options = self._solve_options(request, proof=len(free) == len(self.axes))
            try:
                result = solve_problem(built, tiling, options)
            except WidthError as error:
                raise PlanError(
                    f'method="eliminate" can not plan this model on mesh {self.mesh}: {error}. Use method="auto", '
                    "which eliminates where that is possible and searches where it is not."
                ) from error
        if not result.assignment:
            kind = PlanError if request.limit is None else BudgetError
            raise kind(
                f'method="{request.method}" found no plan on mesh {self.mesh} within time_limit='
                f'{self.settings.time_limit:g} s ({result.status}): allow more time, or use method="auto".'
            )
        # Prices and discounts guide the solver; the cost of a plan is without them.
        cost = result.cost
        if request.prices is not None or request.discount is not None:
            with self.time_phase("problem"):
                plain = request.builder.build(free, current, reuse=request.reuse)
                cost = plain.problem.cost(result.assignment)
        decisions = built.decode(result.assignment)
        interrupted = options.budget.interrupted
        return BlockSolution(decisions, result.cost, cost, result.lower_bound, result.method, interrupted)

    def tiling(self, built: BuiltProblem) -> Tiling | None:
        """Return the repeated layers of a problem; prices do not change them."""
        plain = built.plain
        if id(plain) not in self._tilings:
            self._tilings[id(plain)] = plain, Tiling.of(plain, self.layers)
        return self._tilings[id(plain)][1]

    def _solve_options(self, request: SolveRequest, *, proof: bool) -> SolveOptions:
        is_priced = request.prices is not None or request.discount is not None
        return SolveOptions(
            request.method,
            self.budget.part(1.0),
            proof=proof and not is_priced,
            priced=request.prices is not None,
            fast=self.settings.effort == "fast" or self.proposes,
            proposal=request.discount is not None or self.proposes,
            work_limit=request.work,
            report=self._report_phase if is_priced else self.report,
        )

    @cached_property
    def builder(self) -> ProblemBuilder:
        """Builder of the problems of the planner's constraints; builders for other constraints share its tables."""
        if self._like is not None:
            return self._like.builder.for_graph(self.rules, self.constraints)
        return ProblemBuilder(self.rules, self.tables, self.resharder, self.constraints)

    @property
    def _bound(self) -> float:
        """A lower bound at any prices: that of the problem without a limit, if it was solved."""
        if self.unlimited is not None:
            return self.unlimited.lower_bound
        # Else without a search: every operator at its cheapest, every reshard free.
        total = 0.0
        for node in self.rules.operators:
            rule, call = self.rules.rules[node], self.rules.calls[node]
            total += float(self.tables.seconds(call, rule, self.tables.options(rule), self.rules.zeros[node]).min())
        return total

    # Interruption and progress

    def _update_best(self, plan: CandidatePlan) -> None:
        """Keep the cheapest plan that fits the limit, in case the search is interrupted."""
        limit = self.settings.memory_limit
        fits = limit is None or plan.memory.peak <= limit
        if fits and (self.best is None or plan.cost < self.best.cost):
            bound = plan.lower_bound if self.best is None else self.best.lower_bound
            self.best = replace(plan, lower_bound=min(bound, plan.cost))

    def warn_of_interruption(self, seconds: float) -> None:
        """Warn that the search was interrupted and returns a plan with a step of `seconds`."""
        self.interrupted = True
        # The caller of a search with recomputed layers has only the first planner.
        if self._like is not None:
            self._like.interrupted = True
        warn_caller(
            f"the search was interrupted after {time.monotonic() - self.start:.1f} s: this is the best plan met "
            f"until then, {seconds:.6g} s per step. Plan again for a better one.",
        )

    def _report_phase(self, phase: str, cost: float, bound: float) -> None:
        # With prices of memory, or a discount for hidden collectives, a cost is not in seconds.
        self.report(f"{phase}, at other prices", math.inf, -math.inf)

    def report(self, phase: str, cost: float, bound: float) -> None:
        """Report the phase of the search, the smallest known cost and the bound, in seconds."""
        if self.progress is not None:
            self.progress(Progress(phase, cost, bound, time.monotonic() - self.start))

    @contextlib.contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Context that adds its time to a phase; nested contexts of one phase count once."""
        outermost, start = phase not in self._running, time.perf_counter()
        self._running.add(phase)
        try:
            yield
        finally:
            if outermost:
                self._running.remove(phase)
                self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - start

    # Time and memory of decisions

    def program(self, flow: Flow, reduced: DeferredReduction | None = None) -> PredictedProgram:
        """Return the predicted program of some decisions; `reduced` as for `predict_program`."""
        with self.time_phase("account"):
            return predict_program(flow, self.resharder, self.programs, reduced, self.cluster.device.compiled)

    def replay(self, program: PredictedProgram, prices: KernelPrices) -> ReplayedStep:
        """Return the replayed step of a program."""
        with self.time_phase("schedule"):
            issued = step_calls(program, prices)
            replayed, later = replay([operation for operation, _ in issued]), reduction_timeline(program, prices)
            calls = CallTimes.of(issued, replayed, self.mesh.names, len(self.rules.operators))
            # A reduction shared by several runs of the step counts in parts.
            steps, contention = self.settings.gradient_steps, self.cluster.contention
            seconds = replayed.seconds_with_contention(contention) + later.seconds_with_contention(contention) / steps
            return ReplayedStep(seconds, replayed.exposed + later.exposed / steps, calls)

    def update_seconds(self, program: PredictedProgram, hosted: Collection[str]) -> float:
        """Return the seconds of the optimizer's update on the device, from the bytes that it moves.

        Args:
            program: the program of the step.
            hosted: names of the placeholders of parameters that are updated on the host.
        """
        moved = 0
        for source in self.graph.parameters:
            gradient = program.outputs.get(("gradient", source.name))
            if gradient is not None and source.node.name not in hosted:
                part, shape = program.inputs[source.node.name].meta["val"], Value(source.node).meta.shape
                arrived = gradient.meta["val"].numel() * gradient.meta["val"].element_size()
                moved += self.settings.optimizer.moved_bytes(shape, tuple(part.shape), part.element_size(), arrived)
        return self.cost.compute(0.0, moved, torch.float32) if moved else 0.0

    def host_updates(self, flow: Flow) -> list[HostUpdate]:
        """Return the updates of the parameters whose optimizer state is on the host under some decisions."""
        return host_updates(flow, self.settings.optimizer, self.cost)

    def evaluate(self, decisions: Decisions, cost: float, lower_bound: float, method: str) -> CandidatePlan:
        """Return a plan of some decisions; the time and memory of its program are computed on demand."""
        # Searches find the same decisions many times, and a program takes long to predict.
        for known in self._candidates:
            if known.decisions == decisions:
                return replace(known, cost=cost, lower_bound=lower_bound, method=method)
        estimate = ProgramEstimate(self, self.flow(decisions))
        self._candidates.append(CandidatePlan(decisions, cost, lower_bound, method, estimate))
        return self._candidates[-1]

    def _saved_tensors(self, bytes_made: Mapping[int, int]) -> tuple[SavedTensors, ...]:
        """Return the saved tensors computed at some moments, grouped by operator, those of equal layers once."""
        made: dict[tuple[str, str], dict[str, int]] = {}
        for moment, bytes in bytes_made.items():
            node = self.rules.operators[moment]
            of_line = made.setdefault((str(self.rules.calls[node].op), node_line(node)), {})
            path = self.graph.module_path(node)
            of_line[path] = of_line.get(path, 0) + bytes
        rows = [
            SavedTensors(group.text, operator, line, len(group.names), group.key)
            for (operator, line), held in made.items()
            for group in group_names(held)
        ]
        return tuple(sorted(rows, key=lambda row: -row.count * row.bytes))

    def operation_at(self, moment: int) -> tuple[str, str, str]:
        """Return the phase, module path and operator at a moment of the step."""
        if moment >= len(self.rules.operators):
            return "optimizer", "", "optimizer's step"
        node = self.rules.operators[moment]
        return self.graph.phase(node), self.graph.module_path(node), str(self.rules.calls[node].op)

    def account(self, decisions: Decisions) -> StepAccount:
        """Return the account of the step under some decisions: its operations and collectives."""
        for known in self._accounts:
            if known.flow.decisions is decisions:
                return known
        with self.time_phase("account"):
            flow = self.flow(decisions)
            self._accounts.append(StepAccount(flow, self.tables, self.resharder))
        return self._accounts[-1]

    def flow(self, decisions: Decisions) -> Flow:
        """Return the specs of all tensors under some decisions."""
        return Flow(self.rules, decisions, self.mesh, self.specs)

    def flow_of(self, plan: ShardingPlan) -> Flow:
        """Return the flow of a plan on the planner's graph, with the plan's recomputation and offloading."""
        graph = graph_of_plan(self.graph, plan.recomputed, plan.offloaded)
        rules = self.rules if graph is self.graph else GraphRules(graph, self.mesh)
        return Flow(rules, Decisions.from_data(plan.decisions), self.mesh)

    def describe(self, plan: CandidatePlan) -> ShardingPlan:
        """Return the plan that users get for a candidate."""
        account = self.account(plan.decisions)
        rest, footprint = plan.decisions.rest, plan.estimate.footprint
        placements: dict[str, tuple[Placement, ...]] = {}
        input_placements: dict[str, tuple[Placement, ...]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for source in self.graph.inputs:
            spec = rest[source.node.name]
            if source.kind in ("parameter", "buffer"):
                for name in self.graph.aliases[source.name]:
                    placements[name], shapes[name] = spec.placements, Value(source.node).meta.shape
            elif source.kind == "input":
                input_placements[source.name] = spec.placements
        return ShardingPlan(
            mesh=self.mesh,
            placements=placements,
            input_placements=input_placements,
            output_placements={name: spec.placements for name, spec in plan.decisions.outputs.items()},
            shapes=shapes,
            step_seconds=plan.step_seconds,
            update_seconds=plan.update_seconds,
            host_update_seconds=plan.host_update_seconds,
            memory=replace(
                plan.memory,
                saved=self._saved_tensors(footprint.saved),
                sources=backward_sources(account, footprint.kept),
            ),
            device_memory=self.cost.cluster.device.memory,
            collectives=account.collectives(),
            cost=plan.cost,
            lower_bound=plan.lower_bound,
            method=plan.method,
            timings=dict(self.timings),
            fingerprint=self.graph.fingerprint,
            cluster=self.cluster.name,
            versions={"autoshard": __version__, "torch": torch.__version__},
            decisions=plan.decisions.to_data(),
            choices=tuple(account.decisions()),
            gathered=dict(account.gathered_parameters()),
            recomputed=self.graph.recomputed,
            offloaded=self.graph.offloaded,
            hosted=tuple(
                name
                for source in self.graph.parameters
                if source.node.name in plan.decisions.hosted
                for name in self.graph.aliases[source.name]
            ),
            step_replay=plan.estimate.step_replay(),
        )
