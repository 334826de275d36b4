"""Unequal parts of the dims that a plan splits along an axis, for devices of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.batch_shares import (
    MakePlanner,
    check_program,
    faster_in_proportion,
    plan_batch_shares,
    planned_in_shares,
    settled,
    unlike_axis,
)
from autoshard.capture.joint import JointGraph
from autoshard.errors import PlanError
from autoshard.options import Options
from autoshard.patterns.parts import Loop, in_parts, parted_along
from autoshard.plan import ShardingPlan
from autoshard.planner.planner import Planner
from autoshard.planning import flow_of
from autoshard.specs.axes import MeshShape

_TRIED = 2
"""Into how many numbers of parts dims are divided before the fastest plan is taken: each is planned once or twice."""


def plan_shares(
    graph: JointGraph,
    mesh: MeshShape,
    options: Options,
    seconds: float,
    planner_of: MakePlanner,
    *,
    required: bool = True,
) -> ShardingPlan:
    """A plan with the shares that the options ask for: of the batch of dynamic inputs, or of what is split otherwise.

    Args:
        graph, mesh, options: what is planned.
        seconds: that the capture of the graph took.
        planner_of: makes planners.
        required: whether it is an error if a static graph has nothing that can be divided so; else parts are equal.

    Raises:
        AutoshardError: as for `autoshard.plan`.
    """
    if options.shares == "auto":
        unlike = unlike_axis(options.cluster, mesh)
        if options.dynamic or options.inputs == "local" or unlike is None:
            return plan_batch_shares(graph, mesh, options, seconds, planner_of)
        return _Parts(graph, mesh, unlike, options, seconds, planner_of).in_proportion()
    own = settled(options, mesh, options.shares or {})
    if isinstance(options.shares, Mapping) and not options.dynamic:
        ((axis, counts),) = options.shares.items()
        if options.inputs == "local":
            raise PlanError('shares of what is not the batch are for inputs="global", which every rank passes whole.')
        found = _Parts(graph, mesh, mesh.index(axis), options, seconds, planner_of).planned(counts)
        if found is not None:
            check_program(found[1], found[0])
            return found[0]
        if required:
            raise _no_parts(axis, counts)
        own = settled(options, mesh, {})
    return planned_in_shares(planner_of(graph, own), seconds, own)


def parts_of(counts: Sequence[int]) -> int:
    """Into how many equal parts a dim is divided of which ranks take `counts`, in proportion to one another."""
    return sum(counts) // math.gcd(*counts)


@dataclass(frozen=True)
class _Parts:
    """Plans in which the ranks of an axis hold unequal parts of the dims that a plan of equal parts splits along it.

    Parameters lie whole along that axis, since no `DTensor` has such parts; a rank computes with its part of them.

    Attributes:
        graph, mesh: what is planned; the graph is of static sizes.
        axis: of the mesh, whose ranks hold such parts.
        options: what is asked for.
        seconds: that its capture took.
        planner_of: makes planners.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    graph: JointGraph
    mesh: MeshShape
    axis: int
    options: Options
    seconds: float
    planner_of: MakePlanner

    @cached_property
    def equal(self) -> tuple[ShardingPlan, Planner]:
        """The plan of equal parts, and its planner."""
        own = settled(self.options, self.mesh, {})
        planner = self.planner_of(self.graph, own)
        return planned_in_shares(planner, self.seconds, own), planner

    @cached_property
    def split(self) -> dict[Loop, int]:
        """What that splits along the axis and may be split unequally, and the sizes."""
        plan, planner = self.equal
        return parted_along(flow_of(planner, plan), self.axis)

    def planned(self, counts: Sequence[int]) -> tuple[ShardingPlan, Planner] | None:
        """A plan, and its planner, where ranks take `counts`, in proportion to one another; None where no dim can be
        divided so."""
        total = parts_of(counts)
        own = settled(self.options, self.mesh, {self.mesh.names[self.axis]: counts})
        loops = [loop for loop, size in self.split.items() if size % total == 0]
        if not loops:
            return None
        planner = self.planner_of(in_parts(self.graph, self.mesh, loops, total), own)
        plan = planned_in_shares(planner, self.seconds, own)
        return replace(plan, options={**plan.options, "parts": [list(loop) for loop in loops]}), planner

    def in_proportion(self) -> ShardingPlan:
        """The fastest one of equal parts, and of parts in proportion to speed."""

        def planned(counts: Sequence[int]) -> tuple[ShardingPlan, Planner]:
            found = self.planned(counts)
            assert found is not None, "shares of a total divide what the total divides"
            return found

        found = [self.equal[0]]
        if self.options.output_placements is None:
            totals = totals_of(self.split.values(), self.mesh.sizes[self.axis])
            found += [
                faster_in_proportion(self.equal, self.mesh, self.options, self.axis, total, planned)
                for total in totals[:_TRIED]
            ]
        return min(found, key=lambda plan: plan.step_seconds)


def totals_of(sizes: Iterable[int], ranks: int) -> list[int]:
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


def _no_parts(axis: str, counts: Sequence[int]) -> PlanError:
    """What to say where nothing can be divided so."""
    return PlanError(
        f"shares of axis {axis!r} are {list(counts)}, and no dim that is split along it can be divided in "
        f"{parts_of(counts)} equal parts. Choose shares that add up to a divisor of such dims, or, for shares of the "
        'batch of any size, say which dims of the inputs are the batch: dynamic={"x": {0: "batch"}}.'
    )
