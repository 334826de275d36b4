"""Unequal parts of the dims that a plan splits along an axis, for devices of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.capture.joint import JointGraph
from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.patterns.parts import Loop, unequal_loops, with_unequal_loops
from autoshard.planner.batch_shares import (
    MakePlanner,
    check_program,
    faster_plan,
    heterogeneous_axis,
    plan_batch_shares,
    plan_with_shares,
    with_shares,
)
from autoshard.planner.planner import Planner
from autoshard.planner.planning import flow_of
from autoshard.planner.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape

_MAX_TOTALS = 2
"""Into how many numbers of parts dims are divided before the fastest plan is taken: each is planned once or twice."""


def plan_shares(
    graph: JointGraph,
    mesh: MeshShape,
    target: Target,
    seconds: float,
    planner_of: MakePlanner,
    placed: Collection[str] | None = None,
) -> ShardingPlan:
    """A plan with the shares that the options ask for: of the batch of dynamic inputs, or of what is split otherwise.

    Args:
        graph, mesh, options: what is planned.
        seconds: that the capture of the graph took.
        planner_of: makes planners.
        placed: names of the parameters and buffers that lie as they did for another graph, and stay so: parts of this
            one are equal where nothing can be divided so. None for the first graph, of which that is an error.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    if target.shares == "auto":
        unlike = heterogeneous_axis(target.cluster, mesh)
        if target.dynamic or target.inputs == "local" or unlike is None:
            return plan_batch_shares(graph, mesh, target, seconds, planner_of)
        return _UnequalParts(graph, mesh, unlike, target, seconds, planner_of).plan_proportional()
    own = with_shares(target, mesh, target.shares or {})
    if isinstance(own.shares, Mapping) and not target.dynamic:
        ((axis, counts),) = own.shares.items()
        if target.inputs == "local":
            raise PlanError('shares of what is not the batch are for inputs="global", which every rank passes whole.')
        parts = _UnequalParts(graph, mesh, mesh.index(axis), target, seconds, planner_of, placed or ())
        try:
            found = parts.plan_counts(counts)
        except PlanError:
            if placed is None:
                raise
            found = None
        if found is not None:
            return found[0]
        if placed is None:
            raise _indivisible_error(axis, counts)
        own = with_shares(target, mesh, {})
    return plan_with_shares(planner_of(graph, own), seconds, own)


def part_count(counts: Sequence[int]) -> int:
    """Into how many equal parts a dim is divided of which ranks take `counts`, in proportion to one another."""
    return sum(counts) // math.gcd(*counts)


@dataclass(frozen=True)
class _UnequalParts:
    """Plans in which the ranks of an axis hold unequal parts of the dims that a plan of equal parts splits along it.

    Parameters lie whole along that axis, since no `DTensor` has such parts; a rank computes with its part of them.

    Attributes:
        graph, mesh: what is planned; the graph is of static sizes.
        axis: of the mesh, whose ranks hold such parts.
        options: what is asked for.
        seconds: that its capture took.
        planner_of: makes planners.
        placed: names of what lies as it does, whatever is planned.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    graph: JointGraph
    mesh: MeshShape
    axis: int
    target: Target
    seconds: float
    planner_of: MakePlanner
    placed: Collection[str] = ()

    @cached_property
    def equal_plan(self) -> tuple[ShardingPlan, Planner]:
        """The plan of equal parts, and its planner."""
        return self._plan_equal(self.target)

    @cached_property
    def split_loops(self) -> dict[Loop, int]:
        """The loops that `equal` splits along the axis, as far as they may be split unequally, and their sizes."""
        return self._loops_split_by(self.equal_plan)

    @cached_property
    def split_loops_in_least_memory(self) -> dict[Loop, int]:
        """The same of the plan of equal parts that needs the least memory, whatever the limit."""

        def with_limit(limit: int) -> Target:
            return replace(self.target, settings=replace(self.target.settings, memory_limit=limit))

        try:
            return self._loops_split_by(self._plan_equal(with_limit(1)))
        except BudgetError as error:
            if error.peak is None:
                raise
            return self._loops_split_by(self._plan_equal(with_limit(error.peak)))

    def _plan_equal(self, target: Target) -> tuple[ShardingPlan, Planner]:
        own = with_shares(target, self.mesh, {})
        planner = self.planner_of(self.graph, own)
        return plan_with_shares(planner, self.seconds, own), planner

    def _loops_split_by(self, equal: tuple[ShardingPlan, Planner]) -> dict[Loop, int]:
        plan, planner = equal
        return unequal_loops(flow_of(planner, plan), self.axis, self.placed)

    def plan_counts(self, counts: Sequence[int]) -> tuple[ShardingPlan, Planner] | None:
        """A plan, and its planner, where ranks take `counts`, in proportion to one another; None where no dim can be
        divided so.

        Equal parts need less memory, since parameters lie in shards of them. Where there is no plan within the limit,
        the loops are those of the plan that needs the least, which does not depend on the limit: the limit that the
        error names is then enough.

        Raises:
            AutoshardError: there is no such plan.
        """
        try:
            return self.plan_loops(self.split_loops, counts)
        except BudgetError:
            found = self.plan_loops(self.split_loops_in_least_memory, counts)
            if found is None:
                raise
            return found

    def plan_loops(self, split: Mapping[Loop, int], counts: Sequence[int]) -> tuple[ShardingPlan, Planner] | None:
        """A plan, and its planner, where ranks take `counts` of what is `split`; None where no dim can be divided so.

        Of dims that can't all lie so, since a program needs equal shares of them together, it is the one with which the
        step is the shortest.

        Raises:
            AutoshardError: there is no such plan with any of them.
        """
        loops = [loop for loop, size in split.items() if size % part_count(counts) == 0]
        try:
            return self._plan_parts(loops, counts) if loops else None
        except PlanError as error:
            alone = [self._try_loop(loop, counts) for loop in loops] if len(loops) > 1 else []
            found = [one for one in alone if one is not None]
            if not found:
                raise error
            return min(found, key=lambda one: one[0].step_seconds)

    def _try_loop(self, loop: Loop, counts: Sequence[int]) -> tuple[ShardingPlan, Planner] | None:
        """The plan, and its planner, in which dims of one family lie so; None where there is none."""
        try:
            return self._plan_parts([loop], counts)
        except PlanError:
            return None

    def _plan_parts(self, loops: Sequence[Loop], counts: Sequence[int]) -> tuple[ShardingPlan, Planner]:
        """The plan, and its planner, in which all these loops are in such parts; `PlanError` if a program can't be."""
        own = with_shares(self.target, self.mesh, {self.mesh.names[self.axis]: counts})
        try:
            planner = self.planner_of(with_unequal_loops(self.graph, self.mesh, loops, part_count(counts)), own)
        except RuleError as error:  # an operator is told sizes that its dims have no more, such as a number of groups
            raise PlanError(f"an operator can't be in such parts: {error}") from error
        plan = plan_with_shares(planner, self.seconds, own)
        plan = replace(plan, options={**plan.options, "parts": [list(loop) for loop in loops]})
        check_program(planner, plan)
        return plan, planner

    def plan_proportional(self) -> ShardingPlan:
        """The fastest one of equal parts, and of parts in proportion to speed."""

        def plan_total(counts: Sequence[int]) -> tuple[ShardingPlan, Planner]:
            found = self.plan_loops(self.split_loops, counts)
            assert found is not None, "shares of a total divide what the total divides"
            return found

        found = [self.equal_plan[0]]
        if self.target.output_placements is None:
            totals = candidate_totals(self.split_loops.values(), self.mesh.sizes[self.axis])
            found += [
                faster_plan(self.equal_plan, self.mesh, self.target, self.axis, total, plan_total)
                for total in totals[:_MAX_TOTALS]
            ]
        return min(found, key=lambda plan: plan.step_seconds)


def candidate_totals(sizes: Iterable[int], ranks: int) -> list[int]:
    """Into how many parts dims of these sizes may be divided, so that ranks can take unequal ones.

    Returns:
        Totals, the one that divides most of the sizes first. Of those that divide the same sizes, it is the largest.
    """
    sizes = list(sizes)
    common = {math.gcd(one, other) for one in sizes for other in sizes}
    largest: dict[tuple[bool, ...], int] = {}
    for total in sorted(one for one in common if one > ranks):
        largest[tuple(size % total == 0 for size in sizes)] = total
    return sorted(largest.values(), key=lambda total: -sum(size % total == 0 for size in sizes))


def _indivisible_error(axis: str, counts: Sequence[int]) -> PlanError:
    """What to say where nothing can be divided so."""
    return PlanError(
        f"shares of axis {axis!r} are {list(counts)}, and no dim that is split along it can be divided in "
        f"{part_count(counts)} equal parts. Choose shares that add up to a divisor of such dims, or, for shares of the "
        'batch of any size, say which dims of the inputs are the batch: dynamic={"x": {0: "batch"}}.'
    )
