"""Unequal parts of the dims that a plan splits along an axis, for devices of different kinds (Whale, 3.3.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    parts = _Parts(graph, mesh, options, seconds, planner_of)
    if options.shares == "auto":
        if options.dynamic or options.inputs == "local" or unlike_axis(options.cluster, mesh) is None:
            return plan_batch_shares(graph, mesh, options, seconds, planner_of)
        return parts.in_proportion()
    own = settled(options, mesh, options.shares or {})
    if isinstance(options.shares, Mapping) and not options.dynamic:
        ((axis, counts),) = options.shares.items()
        if options.inputs == "local":
            raise PlanError('shares of what is not the batch are for inputs="global", which every rank passes whole.')
        found = parts.planned(mesh.index(axis), counts)
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
        graph, mesh, options: what is planned; the graph is of static sizes.
        seconds: that its capture took.
        planner_of: makes planners.

    Source: Whale 3.3.1: the operations of a split task graph are balanced "through uneven sharding".
    """

    graph: JointGraph
    mesh: MeshShape
    options: Options
    seconds: float
    planner_of: MakePlanner

    @cached_property
    def equal(self) -> tuple[ShardingPlan, Planner]:
        """The plan of equal parts, and its planner."""
        own = settled(self.options, self.mesh, {})
        planner = self.planner_of(self.graph, own)
        return planned_in_shares(planner, self.seconds, own), planner

    def split(self, axis: int) -> dict[Loop, int]:
        """What that splits along a mesh axis and may be split unequally, and the sizes."""
        plan, planner = self.equal
        return parted_along(flow_of(planner, plan), axis)

    def planned(self, axis: int, counts: Sequence[int]) -> tuple[ShardingPlan, Planner] | None:
        """A plan, and its planner, where ranks take `counts`, in proportion to one another; None where no dim can be
        divided so."""
        total = parts_of(counts)
        own = settled(self.options, self.mesh, {self.mesh.names[axis]: counts})
        loops = [loop for loop, size in self.split(axis).items() if size % total == 0]
        if not loops:
            return None
        planner = self.planner_of(in_parts(self.graph, self.mesh, loops, total), own)
        plan = planned_in_shares(planner, self.seconds, own)
        return replace(plan, options={**plan.options, "parts": [list(loop) for loop in loops]}), planner

    def in_proportion(self) -> ShardingPlan:
        """The faster one of equal parts, and of parts in proportion to speed along the axis on which devices differ."""
        axis = unlike_axis(self.options.cluster, self.mesh)
        assert axis is not None
        total = math.gcd(*self.split(axis).values())

        def planned(counts: Sequence[int]) -> tuple[ShardingPlan, Planner]:
            found = self.planned(axis, counts)
            assert found is not None, "all that is split can be divided in so many parts"
            return found

        if total < self.mesh.sizes[axis] or self.options.output_placements is not None:
            return self.equal[0]
        return faster_in_proportion(self.equal, self.mesh, self.options, axis, total, planned)


def _no_parts(axis: str, counts: Sequence[int]) -> PlanError:
    """What to say where nothing can be divided so."""
    return PlanError(
        f"shares of axis {axis!r} are {list(counts)}, and no dim that is split along it can be divided in "
        f"{parts_of(counts)} equal parts. Choose shares that add up to a divisor of such dims, or, for shares of the "
        'batch of any size, say which dims of the inputs are the batch: dynamic={"x": {0: "batch"}}.'
    )
