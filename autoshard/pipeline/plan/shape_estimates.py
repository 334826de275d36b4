"""Estimated costs of the stages of shapes that are not planned, by those of the planned shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoshard.errors import BudgetError, PlanError
from autoshard.pipeline.assign.stages import Stages
from autoshard.pipeline.plan.shape_planner import MicrobatchGraph, PipelineShape, PlannedShape, ShapePlanner
from autoshard.pipeline.plan.stage_estimates import StageTotals, estimate_stage_costs, totals_at
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.pipeline.schedule.schedule_bounds import least_seconds
from autoshard.pipeline.schedule.schedules import placement


class _Assignments(NamedTuple):
    """Assignments to stages of the graph of one of so many microbatches, one per tolerance of balance."""

    graph: MicrobatchGraph
    microbatches: int
    stages: list[Stages]


class ShapeEstimates:
    """The costs of stages by what is known so far: those of planned shapes, and estimates for the others.

    Args:
        shape_planner: of the search.
        batch: the samples of one step.
        planned: the shapes that the search has planned; it adds to them.
        failed: the shapes that the search could not plan; it adds to them.
    """

    def __init__(
        self,
        shape_planner: ShapePlanner,
        batch: int,
        planned: Mapping[PipelineShape, PlannedShape],
        failed: Mapping[PipelineShape, Exception],
    ) -> None:
        self._shape_planner = shape_planner
        self._batch = batch
        self._planned = planned
        self._failed = failed
        self._assignments_by_virtual: dict[int, _Assignments | None] = {}

    def costs(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        """Return the costs of the stages of a shape; None where there are no such stages."""
        shape = PipelineShape(microbatches, virtual)
        if shape in self._planned:
            return self._planned[shape].costs
        if shape in self._failed:
            return None
        if virtual not in self._assignments_by_virtual:
            self._assignments_by_virtual[virtual] = self._assignments(shape)
        assignments = self._assignments_by_virtual[virtual]
        if assignments is None:
            return None
        scale = assignments.microbatches / microbatches
        candidates = self.assignment_costs(assignments.stages, assignments.graph, microbatches, scale)
        ranks = placement(self._shape_planner.ranks, virtual)
        return min(candidates, key=lambda costs: least_seconds(costs, ranks, microbatches, halves=False))

    def assignment_costs(
        self, assignments: Sequence[Stages], graph: MicrobatchGraph, microbatches: int, scale: float = 1.0
    ) -> list[list[StageCosts]]:
        """Return estimated costs for each of some assignments.

        Args:
            assignments: of the graph.
            graph: of a microbatch.
            microbatches: of the step.
            scale: samples of one of its microbatches, relative to those of the graph.
        """
        totals, links = self._totals(self._batch // microbatches, graph), self._shape_planner.links
        return [estimate_stage_costs(stages, graph.graph, totals, scale, links) for stages in assignments]

    def _assignments(self, shape: PipelineShape) -> _Assignments | None:
        """Return assignments of the captured graph whose microbatches are nearest to those of a shape."""
        number = self._shape_planner.captures.nearest_number(shape.microbatches)
        graph = self._shape_planner.microbatch_graph(number)
        captured_shape = PipelineShape(number, shape.virtual)
        try:
            return _Assignments(graph, number, self._shape_planner.stage_assignments(captured_shape, graph, "order"))
        except (PlanError, BudgetError):
            return None

    def _totals(self, count: int, graph: MicrobatchGraph) -> StageTotals:
        """Return totals for a microbatch of `count` samples, by the planned shapes or else by the graph alone."""
        fewest = min((shape.virtual for shape in self._planned), default=1)
        speeds = [graph.speeds[rank] for rank in placement(self._shape_planner.ranks, 1)]
        known = {}
        for shape, planned in self._planned.items():
            if shape.virtual == fewest:
                crossing = sum(planned.stages.forward_bytes)
                known[self._batch // shape.microbatches] = StageTotals.of(
                    planned.costs, speeds * shape.virtual, crossing
                )
        if known:
            return totals_at(count, known)
        mesh = self._shape_planner.mesh
        return StageTotals.without_communication(graph.graph, mesh.whole.size // mesh.ranks)
