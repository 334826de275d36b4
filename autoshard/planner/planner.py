"""From a joint graph to a plan: solve, fit into the memory there is, and say what was decided."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError, PlanError
from autoshard.memory.footprint import Allocation, Memory
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph import GraphRules, Value
from autoshard.plan import ShardingPlan
from autoshard.planner.account import Account
from autoshard.planner.allocations import allocations
from autoshard.planner.budget import BudgetSearch
from autoshard.planner.found import Found
from autoshard.planner.hidden import HiddenReductions
from autoshard.planner.options import OptionTables
from autoshard.planner.problem import Hiding, ProblemBuilder, Wishes
from autoshard.planner.schedule import step_seconds, timeline
from autoshard.reshard.path import Resharder
from autoshard.solver import solve
from autoshard.solver.eliminate import WidthError
from autoshard.specs.axes import MeshShape
from autoshard.version import __version__

METHODS = ("auto", "eliminate", "alternate", "ilp")
_ROUNDS = 4  # passes over the axes, and over the pairs of axes, of a mesh with three or more


@dataclass(frozen=True, slots=True)
class Settings:
    """How to search.

    Attributes:
        memory_limit: bytes per device that the step's peak may reach; None for no limit.
        optimizer_bytes_per_element: optimizer state of every trained parameter element, in bytes.
        method: one of `METHODS`.
        time_limit: seconds for the whole search.
    """

    memory_limit: int | None = None
    optimizer_bytes_per_element: float = 8.0
    method: str = "auto"
    time_limit: float = 30.0


class Planner:
    """Plans one joint graph on one mesh.

    Args:
        graph: the captured step.
        mesh: the mesh axes.
        cluster: what the devices and links can do.
        wishes: pinned placements, and how inputs and outputs are to lie.
        settings: limits and method.
    """

    def __init__(
        self, graph: JointGraph, mesh: MeshShape, cluster: Cluster, wishes: Wishes, settings: Settings
    ) -> None:
        self.timings: dict[str, float] = {}
        self.graph = graph
        self.mesh = mesh
        self.cluster = cluster
        self.wishes = replace(wishes, state_bytes=settings.optimizer_bytes_per_element)
        self.settings = settings
        self.deadline = time.monotonic() + settings.time_limit
        self.cost = CostModel(cluster, mesh)
        self.resharder = Resharder(mesh, self.cost.collective, self.cost.gradient_collective)
        self.tables = OptionTables(self.cost)
        with self._timed("patterns"):
            self.rules = GraphRules(graph, mesh)

    def plan(self) -> ShardingPlan:
        """Solve and account.

        Raises:
            BudgetError: no plan that was found fits the memory limit; the message names the smallest that does.
        """
        for name, count in self.rules.unknown.items():
            warnings.warn(
                f"no sharding rule for {name} ({count} calls): it is replicated on every device. Register one with "
                f'autoshard.register_rule("{name}", "..."), see docs/rules.md.',
                stacklevel=2,
            )
        limit = self.settings.memory_limit
        found = self.solve(self.wishes)
        if limit is not None and found.memory.peak > limit:
            # What bounds the problem without a limit bounds it with one; the problems solved on the way are narrower.
            found = replace(BudgetSearch(self, limit, found).run(), lower_bound=found.lower_bound)
        else:
            found = HiddenReductions(self, found).run()
        with self._timed("account"):
            return self._describe(found)

    # Search

    def solve(
        self,
        wishes: Wishes,
        *,
        method: str | None = None,
        limit: float | None = None,
        prices: np.ndarray | None = None,
        hiding: Hiding | None = None,
        seconds: float = math.inf,
    ) -> Found:
        """The best decisions found under some wishes.

        Args:
            wishes: what is pinned and forced.
            method: one of `METHODS`; by default that of the settings.
            limit: bytes that what operators and parameters hold may reach at any moment.
            prices: of memory, in seconds per byte at every moment; they decide, and are no part of the cost found.
            hiding: what reductions of gradients count; it decides, and is no part of the cost found.
            seconds: that a single problem may take; at least one, and no more than the planner has left.

        Raises:
            PlanError: the method found no decisions in the time there is, or can't solve this problem.
            BudgetError: the same under a limit.
        """
        builder = ProblemBuilder(self.rules, self.tables, self.resharder, wishes)
        ask = _Ask(builder, method or self.settings.method, limit, prices, hiding, seconds)
        axes = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        if len(axes) <= 2:
            solved = self._solve_block(ask, frozenset(axes), None)
            bound = solved.lower_bound
        else:
            solved = self._solve_in_turn(ask, axes)
            bound = self._floor()
        memory = Memory.of(self.allocations(solved.decisions))
        return Found(solved.decisions, solved.cost, bound, solved.method, memory)

    def allocations(self, decisions: Decisions) -> list[Allocation]:
        """What one device holds, and when, under some decisions."""
        return list(allocations(self.account(decisions)))

    def _solve_block(self, ask: _Ask, free: frozenset[int], current: Decisions | None) -> _Solved:
        with self._timed("problem"):
            built = ask.builder.build(free, current, ask.prices, ask.hiding)
        with self._timed("solve"):
            remaining = max(1.0, min(ask.seconds, self.deadline - time.monotonic()))
            problem = built.problem if ask.limit is None else replace(built.problem, limit=ask.limit)
            method = ask.method
            if method == "auto" and len(free) < sum(size > 1 for size in self.mesh.sizes):
                method = "alternate"  # a proof for some of the axes would prove nothing of all
            try:
                solution = solve(problem, method=method, time_limit=remaining)
            except WidthError as error:
                raise PlanError(
                    f'method="eliminate" can not plan this model on mesh {self.mesh}: {error}. Use method="auto", '
                    "which eliminates where that is possible and searches where it is not."
                ) from error
        if not solution.assignment:
            kind = PlanError if ask.limit is None else BudgetError
            raise kind(
                f'method="{ask.method}" found no plan on mesh {self.mesh} within time_limit='
                f'{self.settings.time_limit:g} s ({solution.status}): allow more time, or use method="auto".'
            )
        cost = solution.cost
        if ask.prices is not None or ask.hiding is not None:
            with self._timed("problem"):
                cost = ask.builder.build(free, current).problem.cost(solution.assignment)
        decisions = built.decode(solution.assignment)
        return _Solved(decisions, solution.cost, cost, solution.lower_bound, solution.method)

    def _solve_in_turn(self, ask: _Ask, axes: list[int]) -> _Solved:
        """Three axes and more: some are open while the others stay, until nothing improves.

        Strategies of all axes at once are too many to list. One axis after the other, each solved exactly, is quick and
        near; then two at a time mend what only two axes can change together.
        """
        order = sorted(axes, key=lambda axis: -self.mesh.sizes[axis])
        best = self._solve_block(ask, frozenset(order[:1]), None)
        for width in (1, 2):
            blocks = [frozenset(block) for block in itertools.combinations(order, width)]
            idle = 0
            for block in itertools.islice(itertools.cycle(blocks), 2 - width, _ROUNDS * len(blocks)):
                if idle == len(blocks) or time.monotonic() > self.deadline:
                    break
                better = self._solve_block(ask, block, best.decisions)
                idle += 1
                if better.value < best.value * (1 - 1e-9):
                    best, idle = better, 1
        return best

    def _floor(self) -> float:
        """A lower bound that needs no search: every operator at its cheapest, every reshard free."""
        total = 0.0
        for node in self.rules.operators:
            rule, call = self.rules.rules[node], self.rules.calls[node]
            total += float(self.tables.seconds(call, rule, self.tables.options(rule), self.rules.zeros[node]).min())
        return total

    # Account

    def account(self, decisions: Decisions) -> Account:
        """The step that some decisions stand for."""
        flow = Flow(self.rules, decisions, self.mesh)
        return Account(flow, self.tables, self.resharder, self.wishes.state_bytes)

    def _describe(self, found: Found) -> ShardingPlan:
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
            step_seconds=step_seconds(timeline(account)),
            memory=found.memory,
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
        )

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class _Ask:
    """What is to be solved: whose problem, how, what is asked of memory, and the seconds for one problem."""

    builder: ProblemBuilder
    method: str
    limit: float | None
    prices: np.ndarray | None
    hiding: Hiding | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Solved:
    """Decisions, what the solver minimised (`value`, by the prices asked for), and their cost in seconds."""

    decisions: Decisions
    value: float
    cost: float
    lower_bound: float
    method: str
