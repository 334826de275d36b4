"""From a joint graph to a plan: solve, fit into the memory there is, and say what was decided."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.errors import BudgetError
from autoshard.memory.budget import format_bytes
from autoshard.memory.footprint import Memory
from autoshard.memory.force import smallest_feasible_k
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph import GraphRules, Value
from autoshard.plan import ShardingPlan
from autoshard.planner.account import Account
from autoshard.planner.allocations import allocations
from autoshard.planner.options import OptionTables
from autoshard.planner.problem import ProblemBuilder, Wishes
from autoshard.reshard.path import Resharder
from autoshard.solver import Solution, solve
from autoshard.specs.axes import MeshShape
from autoshard.version import __version__

METHODS = ("auto", "eliminate", "alternate", "ilp")
_ROUNDS = 4  # passes over the axes, and over the pairs of axes, of a mesh with three or more
_CORRECTIONS = 7  # times that the memory rows are tightened by what the account finds


@dataclass(frozen=True, slots=True)
class Found:
    """A solved plan: what was decided, and how good it is."""

    decisions: Decisions
    cost: float
    lower_bound: float
    method: str
    memory: Memory


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
        self.resharder = Resharder(mesh, self.cost.collective)
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
        found = self._solve(self.wishes)
        if limit is not None and found.memory.peak > limit:
            # What bounds the problem without a limit bounds it with one; the problems solved on the way are narrower.
            found = replace(self._within(limit, found), lower_bound=found.lower_bound)
        with self._timed("account"):
            return self._describe(found)

    # Search

    def _solve(self, wishes: Wishes, limit: float | None = None) -> Found:
        """The best decisions under some wishes."""
        builder = ProblemBuilder(self.rules, self.tables, self.resharder, wishes)
        axes = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        if len(axes) <= 2:
            decisions, solution = self._solve_block(builder, frozenset(axes), None, limit)
            bound = solution.lower_bound
        else:
            decisions, solution = self._solve_in_turn(builder, axes, limit)
            bound = self._floor()
        return Found(decisions, solution.cost, bound, solution.method, _memory(self._account(decisions)))

    def _solve_block(
        self, builder: ProblemBuilder, free: frozenset[int], current: Decisions | None, limit: float | None
    ) -> tuple[Decisions, Solution]:
        with self._timed("problem"):
            built = builder.build(free, current)
        with self._timed("solve"):
            remaining = max(1.0, self.deadline - time.monotonic())
            problem = built.problem if limit is None else replace(built.problem, limit=limit)
            method = self.settings.method
            if method == "auto" and len(free) < sum(size > 1 for size in self.mesh.sizes):
                method = "alternate"  # a proof for some of the axes would prove nothing of all
            solution = solve(problem, method=method, time_limit=remaining)
        if not solution.assignment:
            raise BudgetError(f"no assignment found ({solution.status}) in {self.settings.time_limit} seconds.")
        return built.decode(solution.assignment), solution

    def _solve_in_turn(
        self, builder: ProblemBuilder, axes: list[int], limit: float | None
    ) -> tuple[Decisions, Solution]:
        """Three axes and more: some are open while the others stay, until nothing improves.

        Strategies of all axes at once are too many to list. One axis after the other, each solved exactly, is quick and
        near; then two at a time mend what only two axes can change together.
        """
        order = sorted(axes, key=lambda axis: -self.mesh.sizes[axis])
        decisions, best = self._solve_block(builder, frozenset(order[:1]), None, limit)
        for width in (1, 2):
            blocks = [frozenset(block) for block in itertools.combinations(order, width)]
            idle = 0
            for block in itertools.islice(itertools.cycle(blocks), 2 - width, _ROUNDS * len(blocks)):
                if idle == len(blocks) or time.monotonic() > self.deadline:
                    break
                better, solution = self._solve_block(builder, block, decisions, limit)
                idle += 1
                if solution.cost < best.cost * (1 - 1e-9):
                    decisions, best, idle = better, solution, 1
        return decisions, best

    def _floor(self) -> float:
        """A lower bound that needs no search: every operator at its cheapest, every reshard free."""
        total = 0.0
        for node in self.rules.operators:
            rule, call = self.rules.rules[node], self.rules.calls[node]
            total += float(self.tables.seconds(call, rule, self.tables.options(rule)).min())
        return total

    # Memory

    def _within(self, limit: int, unlimited: Found) -> Found:
        """The fastest plan found whose peak is within the limit.

        Forcing the largest parameters to be sharded comes first (Rhino 4.4). What then is still too much are
        activations, which rows of memory in the problem itself bound (Rhino 4.2); `method="ilp"` starts with these.

        Raises:
            BudgetError: no plan found fits. The peak it names is found in the same way at every limit, so that it fits.
        """
        if self.settings.method == "ilp":
            found = self._by_memory_rows(limit, self.wishes, unlimited.memory.peak)
            if found is not None:
                return found
        sizes = {
            source.name: Value(source.node).meta.bytes
            for source in self.graph.inputs
            if source.kind == "parameter" and any(one is None for one in self.wishes.pinned.get(source.name, (None,)))
        }

        def fits(forced: frozenset[str]) -> Found | None:
            found = self._solve(replace(self.wishes, forced=forced)) if forced else unlimited
            return found if found.memory.peak <= limit else None

        answer = smallest_feasible_k(sizes, fits)
        if answer is not None:
            forced_count, found = answer
            return replace(found, method=f"{found.method}, the {forced_count} largest parameters forced to be sharded")
        everything = replace(self.wishes, forced=frozenset(sizes))
        forced_all = self._solve(everything)
        least = min(self._by_memory_rows(0, everything, forced_all.memory.peak) or forced_all, forced_all, key=_peak)
        if _peak(least) > limit:
            raise self._over_budget(limit, least.memory)
        faster = self._by_memory_rows(limit, everything, forced_all.memory.peak)
        found = least if faster is None or faster.cost > least.cost else faster
        return replace(found, method=f"{found.method}, all parameters forced to be sharded, activations bounded")

    def _by_memory_rows(self, limit: int, wishes: Wishes, known: int) -> Found | None:
        """Rows of memory in the problem (Rhino 4.2): the fastest plan found within the limit.

        The problem sees less than the account does (copies that a reshard makes), so that its limit is bisected,
        between nothing and the `known` peak of a plan, until the account agrees with the one asked for.

        Returns:
            None if there is none; for a limit of 0, the plan of the smallest peak.
        """
        impossible, loose, best = 0.0, float(known), None
        rows = float(limit) or loose / 2
        for _ in range(_CORRECTIONS):
            try:
                found = self._solve(wishes, rows)
            except BudgetError:
                impossible = rows
            else:
                if found.memory.peak <= limit:
                    return found
                if limit == 0 and (best is None or _peak(found) < _peak(best)):
                    best = found
                loose = rows
            rows = (impossible + loose) / 2
        return best

    def _over_budget(self, limit: int, least: Memory) -> BudgetError:
        shortened = (
            f" The search ended at time_limit={self.settings.time_limit:g} s: a longer one may find a smaller peak."
            if time.monotonic() > self.deadline
            else ""
        )
        return BudgetError(
            f"no plan fits in {format_bytes(limit)} per device on mesh {self.mesh}: the smallest peak found is "
            f"{format_bytes(least.peak)} (parameters {format_bytes(least.parameters)}, gradients "
            f"{format_bytes(least.gradients)}, optimizer {format_bytes(least.optimizer)}, activations "
            f"{format_bytes(least.activations)}). Raise memory_limit to {least.peak} bytes, add devices, or make the "
            f"batch smaller.{shortened}"
        )

    # Account

    def _account(self, decisions: Decisions) -> Account:
        flow = Flow(self.rules, decisions, self.mesh)
        return Account(flow, self.tables, self.resharder, self.wishes.state_bytes)

    def _describe(self, found: Found) -> ShardingPlan:
        account = self._account(found.decisions)
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
            step_seconds=account.timeline().seconds,
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


def _peak(found: Found) -> int:
    return found.memory.peak


def _memory(account: Account) -> Memory:
    return Memory.of(list(allocations(account)))
