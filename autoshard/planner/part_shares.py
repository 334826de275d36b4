"""Unequal parts of the dims that a plan splits along an axis, for devices of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.options.target import Target
from autoshard.patterns.parts import Loop, unequal_loops
from autoshard.planner.batch_shares import (
    PlanAndPlanner,
    check_program,
    faster_plan,
    heterogeneous_axis,
    plan_batch_shares,
    plan_with_shares,
    with_shares,
)
from autoshard.planner.captured_call import CapturedCall
from autoshard.plans.sharding_plan import ShardingPlan

_MAX_TOTALS = 2  # numbers of parts that are tried; each is planned once or twice


def plan_shares(call: CapturedCall) -> ShardingPlan:
    """Return a plan with the requested shares: of the batch of dynamic inputs, or of other dims.

    If no dim can be divided into the requested parts, a later call of a module gets equal parts; for the first call
    that is an error.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    mesh, target = call.mesh, call.target
    if target.shares == "auto":
        axis = heterogeneous_axis(target.cluster, mesh)
        if target.dynamic or target.inputs == "local" or axis is None:
            return plan_batch_shares(call)
        return UnequalParts(call, axis).plan_proportional()
    shares = target.shares or {}
    if shares and not target.dynamic:
        shared_target = with_shares(target, mesh, shares)
        # A single rank takes all.
        if isinstance(shared_target.shares, Mapping):
            ((axis_name, counts),) = shared_target.shares.items()
            if target.inputs == "local":
                raise PlanError(
                    'shares of what is not the batch are for inputs="global", which every rank passes whole.'
                )
            try:
                planned = UnequalParts(call, mesh.index(axis_name)).plan_counts(counts)
            except PlanError:
                if call.placed is None:
                    raise
                planned = None
            if planned is not None:
                return planned[0]
            if call.placed is None:
                raise _indivisible_error(axis_name, counts)
        shares = {}
    return plan_with_shares(call, with_shares(target, mesh, shares))[0]


def part_count(counts: Sequence[int]) -> int:
    """Return the number of equal parts into which a dim is divided for shares in proportion to `counts`."""
    return sum(counts) // math.gcd(*counts)


@dataclass(frozen=True)
class UnequalParts:
    """Plans in which the ranks of an axis hold unequal parts of the dims that a plan of equal parts splits along it.

    Parameters lie whole along that axis, since no `DTensor` has such parts; a rank computes with its part of them.

    Attributes:
        call: the call that is planned, of static sizes. Parameters that were placed before stay.
        axis: the mesh axis.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    call: CapturedCall
    axis: int

    @cached_property
    def equal_plan(self) -> PlanAndPlanner:
        """The plan of equal parts, and its planner."""
        return self._plan_equal(self.call.target)

    @cached_property
    def split_loops(self) -> dict[Loop, int]:
        """The loops that the plan of equal parts splits along the axis, if they can be split unequally; their sizes."""
        return self._loops_split_by(self.equal_plan)

    @cached_property
    def split_loops_in_least_memory(self) -> dict[Loop, int]:
        """The same loops of the plan of equal parts with the smallest peak, whatever the limit."""

        def with_limit(limit: int) -> Target:
            target = self.call.target
            return replace(target, settings=replace(target.settings, memory_limit=limit))

        try:
            return self._loops_split_by(self._plan_equal(with_limit(1)))
        except BudgetError as error:
            if error.peak is None:
                raise
            return self._loops_split_by(self._plan_equal(with_limit(error.peak)))

    def _plan_equal(self, target: Target) -> PlanAndPlanner:
        return plan_with_shares(self.call, with_shares(target, self.call.mesh, {}))

    def _loops_split_by(self, equal: PlanAndPlanner) -> dict[Loop, int]:
        plan, planner = equal
        return unequal_loops(planner.flow_of(plan), self.axis, self.call.placed or ())

    def plan_counts(self, counts: Sequence[int]) -> PlanAndPlanner | None:
        """Return a plan in which ranks take parts in proportion to `counts`; None if no dim can be divided so.

        Raises:
            AutoshardError: there is no such plan.
        """
        try:
            return self.plan_loops(self.split_loops, counts)
        except BudgetError:
            # Equal parts need less memory, since parameters lie in shards of them. The loops of the smallest peak do
            # not depend on the limit, so that the limit which the error names is enough.
            planned = self.plan_loops(self.split_loops_in_least_memory, counts)
            if planned is None:
                raise
            return planned

    def plan_loops(self, split: Mapping[Loop, int], counts: Sequence[int]) -> PlanAndPlanner | None:
        """Return a plan in which ranks take `counts` of the loops in `split`; None if no loop can be divided so.

        If a program needs equal shares of some of the loops together, only one loop is divided: the one with which the
        step is the shortest.

        Raises:
            AutoshardError: there is no such plan with any of the loops.
        """
        loops = [loop for loop, size in split.items() if size % part_count(counts) == 0]
        try:
            return self.plan_parts(loops, counts) if loops else None
        except PlanError as error:
            alone: list[PlanAndPlanner] = []
            for loop in loops if len(loops) > 1 else ():
                with contextlib.suppress(PlanError):
                    alone.append(self.plan_parts([loop], counts))
            if not alone:
                raise error
            return min(alone, key=lambda planned: planned[0].step_seconds)

    def plan_parts(self, loops: Sequence[Loop], counts: Sequence[int]) -> PlanAndPlanner:
        """Return a plan in which all of some loops are in such parts.

        Raises:
            PlanError: an operator needs equal parts.
        """
        mesh = self.call.mesh
        shared_target = with_shares(self.call.target, mesh, {mesh.names[self.axis]: counts})
        try:
            graph = self.call.graph_in_parts(loops, part_count(counts))
            self.call.planner_of(shared_target, graph)
        except RuleError as error:
            # An argument of an operator is a size that its dims no longer have, such as a number of groups.
            raise PlanError(f"an operator can't be in such parts: {error}") from error
        plan, planner = plan_with_shares(self.call, shared_target, graph)
        plan = replace(plan, options={**plan.options, "parts": [list(loop) for loop in loops]})
        check_program(planner, plan)
        return plan, planner

    def plan_proportional(self) -> ShardingPlan:
        """Return the fastest plan of equal parts, and of parts in proportion to speed."""

        def plan_total(counts: Sequence[int]) -> PlanAndPlanner:
            planned = self.plan_loops(self.split_loops, counts)
            assert planned is not None, "shares of a total divide what the total divides"
            return planned

        plans = [self.equal_plan[0]]
        # No `DTensor` has unequal parts, so that outputs come back whole.
        if self.call.target.output_placements is None:
            totals = candidate_totals(self.split_loops.values(), self.call.mesh.sizes[self.axis])
            plans += [
                faster_plan(self.call, self.equal_plan, self.axis, total, plan_total) for total in totals[:_MAX_TOTALS]
            ]
        return min(plans, key=lambda plan: plan.step_seconds)


def candidate_totals(sizes: Iterable[int], ranks: int) -> list[int]:
    """Return the numbers of parts into which dims of these sizes may be divided for unequal shares of the ranks.

    The number that divides most of the sizes comes first. Of those that divide the same sizes, it is the largest.
    """
    sizes = list(sizes)
    common = {math.gcd(first, second) for first in sizes for second in sizes}
    largest: dict[tuple[bool, ...], int] = {}
    for total in sorted(divisor for divisor in common if divisor > ranks):
        largest[tuple(size % total == 0 for size in sizes)] = total
    return sorted(largest.values(), key=lambda total: -sum(size % total == 0 for size in sizes))


def _indivisible_error(axis: str, counts: Sequence[int]) -> PlanError:
    return PlanError(
        f"shares of axis {axis!r} are {list(counts)}, and no dim that is split along it can be divided in "
        f"{part_count(counts)} equal parts. Choose shares that add up to a divisor of such dims, or, for shares of the "
        'batch of any size, say which dims of the inputs are the batch: dynamic={"x": {0: "batch"}}.'
    )
