"""Estimated costs of stages for unplanned shapes, from those of planned ones: they decide which shape to plan next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autoshard.errors import BudgetError, PlanError
from autoshard.pipeline.graph.stage_graph import StageGraph
from autoshard.pipeline.graph.stages import Stages
from autoshard.pipeline.plan.planned_stage import Links
from autoshard.pipeline.plan.shape_planner import MicrobatchGraph, PipelineShape, PlannedShape, ShapePlanner
from autoshard.pipeline.schedule.actions import placement
from autoshard.pipeline.schedule.costs import StageCosts, least_seconds


@dataclass(frozen=True, slots=True)
class StageTotals:
    """The total costs of all stages for one microbatch, on one device per stage; times are on devices of speed 1.

    Attributes:
        forward, backward: seconds.
        weights: the seconds of backward for gradients of parameters.
        saved: bytes kept per microbatch.
        rest: bytes held throughout the step.
        working: the maximum of further bytes over the stages.
        application: bytes held during the optimizer's update.
        sent: the fraction of the bytes crossing a boundary that one device sends.
        reduction: seconds of reducing gradients, once per step, on devices of any speed.
    """

    forward: float
    backward: float
    weights: float
    saved: float
    rest: float
    working: float
    application: float
    sent: float = 1.0
    reduction: float = 0.0

    @staticmethod
    def without_communication(graph: StageGraph, devices: int) -> StageTotals:
        """Return the totals of a graph's operators if a stage's devices shared them without communication."""
        backward = sum(node.backward_seconds for node in graph.nodes) / devices
        return StageTotals(
            forward=sum(node.forward_seconds for node in graph.nodes) / devices,
            backward=backward,
            # A matrix product takes as long for each of its two gradients.
            weights=backward / 2,
            saved=sum(node.saved_bytes for node in graph.nodes) / devices,
            rest=sum(graph.at_rest.values()) / devices,
            working=0.0,
            application=0.0,
        )

    @staticmethod
    def of(costs: Sequence[StageCosts], speeds: Sequence[float], crossing: int) -> StageTotals:
        """Return the totals of planned stages; `crossing` bytes of whole tensors cross all their boundaries."""
        return StageTotals(
            forward=sum(cost.forward_seconds * speed for cost, speed in zip(costs, speeds, strict=True)),
            backward=sum(cost.backward_seconds * speed for cost, speed in zip(costs, speeds, strict=True)),
            weights=sum(cost.weight_backward_seconds * speed for cost, speed in zip(costs, speeds, strict=True)),
            saved=sum(cost.saved_bytes for cost in costs),
            rest=sum(cost.rest_bytes for cost in costs),
            working=max(cost.working_bytes for cost in costs),
            application=sum(cost.application_bytes for cost in costs),
            sent=sum(cost.forward_bytes for cost in costs) / crossing if crossing else 1.0,
            reduction=sum(cost.reduction_seconds for cost in costs),
        )


def totals_at(samples: int, known: Mapping[int, StageTotals]) -> StageTotals:
    """Return the totals for a microbatch of some samples, interpolated linearly from the two nearest known ones.

    The line has an offset: costs independent of the microbatch, such as latencies and gathers of parameters. With one
    known microbatch, totals are proportional to its samples.
    """
    first, *others = sorted(known, key=lambda count: (abs(count - samples), count))
    near = known[first]
    if samples == first:
        return near
    if not others:
        scale = samples / first
        scaled = {name: getattr(near, name) * scale for name in ("forward", "backward", "weights", "saved", "working")}
        return replace(near, **scaled)
    along = (samples - first) / (others[0] - first)
    line = {}
    for name in (item.name for item in fields(StageTotals)):
        start: float = getattr(near, name)
        # Extrapolation may give values below zero.
        line[name] = max(0.0, start + along * (getattr(known[others[0]], name) - start))
    # Gradients are reduced once per step, whatever the microbatch.
    return replace(StageTotals(**line), reduction=near.reduction)


def estimate_stage_costs(
    stages: Stages, graph: StageGraph, totals: StageTotals, scale: float, links: Links
) -> list[StageCosts]:
    """Return estimated costs of assigned stages: each has a share of the totals equal to its share of the graph.

    Args:
        stages: the assignment.
        graph: the graph that was assigned.
        totals: the totals of one microbatch.
        scale: samples of that microbatch, relative to those of the exported graph.
        links: the links along the pipeline.
    """
    of_graph = stages.totals
    work, kept, rest = graph.seconds, sum(of_graph.saved), sum(of_graph.at_rest)
    costs = []
    for index, seconds in enumerate(of_graph.seconds):
        share = seconds / work if work else 1.0 / len(of_graph.seconds)
        # Interpolated totals may have more seconds for the half than for the whole.
        weights = min(totals.weights, totals.backward) * share
        at_rest = of_graph.at_rest[index] / rest if rest else 0.0
        saved = of_graph.saved[index] / kept if kept else 0.0
        sent = of_graph.forward_bytes[index] if index + 1 < len(of_graph.seconds) else 0
        returned = of_graph.backward_bytes[index - 1] if index else 0
        forward_bytes, backward_bytes = (int(amount * scale * totals.sent) for amount in (sent, returned))
        costs.append(
            StageCosts(
                forward_seconds=totals.forward * share,
                input_backward_seconds=totals.backward * share - weights,
                weight_backward_seconds=weights,
                forward_bytes=forward_bytes,
                forward_send_seconds=links.send(forward_bytes),
                backward_bytes=backward_bytes,
                backward_send_seconds=links.send(backward_bytes),
                rest_bytes=int(totals.rest * at_rest),
                saved_bytes=int(totals.saved * saved),
                working_bytes=int(totals.working),
                reduction_seconds=totals.reduction * at_rest,
                application_bytes=int(totals.application * at_rest),
            )
        )
    return costs


class ShapeEstimates:
    """The costs of stages as currently known: those of planned shapes, and estimates for the others.

    Args:
        shape_planner: the shape planner of the search.
        batch: the samples per step.
        planned: the shapes planned by the search, which adds to them.
        failed: the shapes that could not be planned; the search adds to them.
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
        # By stages per rank: a graph, and an assignment per tolerance of balance; None if there are no such stages.
        self._assignments_by_virtual: dict[int, tuple[MicrobatchGraph, list[Stages]] | None] = {}

    def costs(self, microbatches: int, virtual: int) -> Sequence[StageCosts] | None:
        """Return the costs of a shape's stages; None if there are no such stages."""
        shape = PipelineShape(microbatches, virtual)
        if shape in self._planned:
            return self._planned[shape].costs
        if shape in self._failed:
            return None
        if virtual not in self._assignments_by_virtual:
            self._assignments_by_virtual[virtual] = self._assignments(shape)
        known = self._assignments_by_virtual[virtual]
        if known is None:
            return None
        graph, assignments = known
        candidates = self.assignment_costs(assignments, graph, microbatches)
        ranks = placement(self._shape_planner.ranks, virtual)
        return min(candidates, key=lambda costs: least_seconds(costs, ranks, microbatches, halves=False))

    def assignment_costs(
        self, assignments: Sequence[Stages], graph: MicrobatchGraph, microbatches: int
    ) -> list[list[StageCosts]]:
        """Return estimated costs for each assignment of a graph, in a step with a number of microbatches."""
        scale = graph.microbatches / microbatches
        totals, links = self._totals(self._batch // microbatches, graph), self._shape_planner.links
        return [estimate_stage_costs(stages, graph.graph, totals, scale, links) for stages in assignments]

    def _assignments(self, shape: PipelineShape) -> tuple[MicrobatchGraph, list[Stages]] | None:
        """Return the captured graph whose number of microbatches is nearest to a shape's, and its assignments."""
        number = self._shape_planner.captures.nearest_number(shape.microbatches)
        graph = self._shape_planner.microbatch_graph(number)
        captured_shape = PipelineShape(number, shape.virtual)
        try:
            # In order, because the integer program would take most of a search's time.
            return graph, self._shape_planner.stage_assignments(captured_shape, graph, in_order=True)
        except (PlanError, BudgetError):
            return None

    def _totals(self, count: int, graph: MicrobatchGraph) -> StageTotals:
        """Return totals for a microbatch of `count` samples, from the planned shapes or else from the graph alone."""
        # Totals are linear only for one number of stages per rank, because every boundary adds to them.
        fewest = min((shape.virtual for shape in self._planned), default=1)
        speeds = [graph.speeds[rank] for rank in placement(self._shape_planner.ranks, 1)]
        known = {}
        for shape, planned in self._planned.items():
            if shape.virtual == fewest:
                crossing = sum(planned.stages.totals.forward_bytes)
                known[self._batch // shape.microbatches] = StageTotals.of(
                    planned.costs, speeds * shape.virtual, crossing
                )
        if known:
            return totals_at(count, known)
        mesh = self._shape_planner.mesh
        return StageTotals.without_communication(graph.graph, mesh.whole.size // mesh.ranks)
