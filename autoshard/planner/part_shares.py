"""Unequal parts of the dims that a plan splits along an axis, for devices of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import BudgetError, PlanError, RuleError
from autoshard.options.target import Target
from autoshard.patterns.parts import Loop, unequal_loops
from autoshard.planner.batch_shares import (
    check_program,
    faster_plan,
    heterogeneous_axis,
    plan_batch_shares,
    plan_with_shares,
    with_shares,
)
from autoshard.planner.captured_call import CapturedCall
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan

_MAX_TOTALS = 2
"""Into how many numbers of parts dims are divided before the fastest plan is taken: each is planned once or twice."""


def plan_shares(call: CapturedCall) -> ShardingPlan:
    """Return a plan with the shares that were asked for: of the batch of dynamic inputs, or of other dims.

    For a later call of a module, parts are equal where no dim can be divided so; for the first, that is an error.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    mesh, target = call.mesh, call.target
    if target.shares == "auto":
        axis = heterogeneous_axis(target.cluster, mesh)
        if target.dynamic or target.inputs == "local" or axis is None:
            return plan_batch_shares(call)
        return _UnequalParts(call, axis).plan_proportional()
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
                found = _UnequalParts(call, mesh.index(axis_name)).plan_counts(counts)
            except PlanError:
                if call.placed is None:
                    raise
                found = None
            if found is not None:
                return found[0]
            if call.placed is None:
                raise _indivisible_error(axis_name, counts)
        shares = {}
    shared_target = with_shares(target, mesh, shares)
    return plan_with_shares(call.planner_of(shared_target), call.seconds, shared_target)


def part_count(counts: Sequence[int]) -> int:
    """Into how many equal parts a dim is divided of which ranks take `counts`, in proportion to one another."""
    return sum(counts) // math.gcd(*counts)


@dataclass(frozen=True)
class _UnequalParts:
    """Plans in which the ranks of an axis hold unequal parts of the dims that a plan of equal parts splits along it.

    Parameters lie whole along that axis, since no `DTensor` has such parts; a rank computes with its part of them.

    Attributes:
        call: the call that is planned, of static sizes. What was placed before stays.
        axis: the mesh axis whose ranks hold such parts.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    call: CapturedCall
    axis: int

    @cached_property
    def equal_plan(self) -> tuple[ShardingPlan, Planner]:
        """The plan of equal parts, and its planner."""
        return self._plan_equal(self.call.target)

    @cached_property
    def split_loops(self) -> dict[Loop, int]:
        """The loops that `equal` splits along the axis, as far as they may be split unequally, and their sizes."""
        return self._loops_split_by(self.equal_plan)

    @cached_property
    def split_loops_in_least_memory(self) -> dict[Loop, int]:
        """The same of the plan of equal parts that needs the least memory, whatever the limit."""

        def with_limit(limit: int) -> Target:
            target = self.call.target
            return replace(target, settings=replace(target.settings, memory_limit=limit))

        try:
            return self._loops_split_by(self._plan_equal(with_limit(1)))
        except BudgetError as error:
            if error.peak is None:
                raise
            return self._loops_split_by(self._plan_equal(with_limit(error.peak)))

    def _plan_equal(self, target: Target) -> tuple[ShardingPlan, Planner]:
        equal_target = with_shares(target, self.call.mesh, {})
        planner = self.call.planner_of(equal_target)
        return plan_with_shares(planner, self.call.seconds, equal_target), planner

    def _loops_split_by(self, equal: tuple[ShardingPlan, Planner]) -> dict[Loop, int]:
        plan, planner = equal
        return unequal_loops(planner.flow_of(plan), self.axis, self.call.placed or ())

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
        mesh = self.call.mesh
        shared_target = with_shares(self.call.target, mesh, {mesh.names[self.axis]: counts})
        try:
            graph = self.call.graph_in_parts(loops, part_count(counts))
            planner = self.call.planner_of(shared_target, graph)
        except RuleError as error:
            # An argument of an operator is a size that its dims no longer have, such as a number of groups.
            raise PlanError(f"an operator can't be in such parts: {error}") from error
        plan = plan_with_shares(planner, self.call.seconds, shared_target)
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
        if self.call.target.output_placements is None:
            totals = candidate_totals(self.split_loops.values(), self.call.mesh.sizes[self.axis])
            found += [
                faster_plan(self.call, self.equal_plan, self.axis, total, plan_total) for total in totals[:_MAX_TOTALS]
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
