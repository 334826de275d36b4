"""Plans of the stages of one cut, made by the planner of ordinary modules on the mesh of each stage's ranks.

If stages need too much memory, they are planned again with tighter budgets: limits, recomputation, earlier reductions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.tensor import Placement, Replicate

from autoshard.capture.joint import JointGraph
from autoshard.capture.recomputation import layers as layers_of
from autoshard.capture.recomputation import recompute_layers
from autoshard.errors import BudgetError, PlanError
from autoshard.options import Hints
from autoshard.options.options import ALWAYS_RECOMPUTE
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions
from autoshard.pipeline.graph.stage_slices import StageModule
from autoshard.pipeline.plan.planned_stage import Links, PlannedStage, parts_are_equal
from autoshard.pipeline.plan.stage_reuse import (
    rename_decisions,
    structural_fingerprint,
    task_graph_marks,
)
from autoshard.pipeline.schedule.actions import placement
from autoshard.pipeline.schedule.costs import StageCosts, rest_bytes
from autoshard.planner.planner import Planner
from autoshard.planner.planning import planner_for, recomputing_planner, run_planner, with_provenance
from autoshard.planner.regions import with_regions
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.reshard.reductions import DeferredReduction
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

Pins = Mapping[str, tuple[Placement | None, ...]]
"""Placements of parameters, by their first names."""


@dataclass(frozen=True, slots=True)
class StageBudget:
    """The devices and the memory for which a stage is planned.

    Attributes:
        limit: bytes that the stage's step may reach; None for no limit.
        recompute: what its backward half may recompute, as for `autoshard.plan`.
        target: the index of its devices among the targets of the `StagePlanner`.
        microbatches: the number of microbatches over which its gradients are summed.
        reduced: the gradients that are reduced once per step.
        under_way: the number of microbatches in flight, each with its saved tensors.
        or_leanest: True if the leanest plan is acceptable when no plan meets the limit.
    """

    limit: int | None
    recompute: str
    target: int = 0
    microbatches: int = 1
    reduced: DeferredReduction = "step"
    under_way: int = 1
    or_leanest: bool = False


@dataclass(frozen=True, slots=True)
class StageTarget:
    """The target and the mesh of a stage.

    Attributes:
        target: the target with the cluster of the stage's ranks, without hints.
        mesh: the mesh of one stage.
    """

    target: Target
    mesh: MeshShape


class StagePlanner:
    """Plans stages, equal ones only once.

    Args:
        targets: one for every kind of devices.
        pinned: for every target, the placements pinned by hints.
        hints: the user's hints, as recorded in the plans of stages.
        links: the links along the pipeline, over which gradients of tied parameters are summed; free by default.

    Attributes:
        seconds: seconds of captures and of planning.
        time_limit: seconds of the search for one stage's plan.
    """

    def __init__(
        self,
        targets: Sequence[StageTarget],
        pinned: Sequence[Pins],
        hints: Hints | None,
        links: Links | None = None,
    ) -> None:
        self.links = links
        self.targets = tuple(targets)
        self.time_limit = targets[0].target.settings.time_limit
        self.pinned = tuple(pinned)
        self.hints = hints
        self.seconds: dict[str, float] = {"capture": 0.0, "plan": 0.0}
        # Later planners with the same devices and price of reductions reuse a planner's operators and reshards.
        self._planner_by_target: dict[tuple[int, int], Planner] = {}
        self._steps: dict[JointGraph, JointGraph] = {}
        self._known_stages: dict[Any, PlannedStage] = {}
        # Planners of the same stage with another limit or none: their results hold for every limit.
        self._earlier_planners: dict[Any, Planner] = {}
        # The smallest peaks found with limits that were too low.
        self._smallest_peaks: dict[StageBudget, int] = {}

    def plan(
        self, stages: Sequence[StageModule], budgets: Sequence[StageBudget], ranks_of: Sequence[int] = ()
    ) -> list[PlannedStage]:
        """Plan all stages of a cut.

        A stage passes tensors on with the placements in which it computes them, and the next stage receives them with
        these. A reshard that the next stage needs is part of its own plan, on the links inside a stage (Whale's
        bridge). Tied parameters have the same placements on all stages that hold them.

        Args:
            stages: the stages in order.
            budgets: one per stage.
            ranks_of: the pipeline rank of every stage; by default each stage has its own.

        Raises:
            BudgetError: a stage cannot be planned within its budget.
            KeyboardInterrupt: Ctrl-C, whether or not the current stage already has a plan.
        """
        pins = self._pin_tied_parameters(stages, budgets, ranks_of or range(len(stages)))
        planned: list[PlannedStage] = []
        targets = [self.targets[budget.target] for budget in budgets]
        received = None
        for stage in stages:
            here = stage.index
            # Stages with other shares, or on another mesh, exchange whole tensors.
            passes_shards = False
            if stage.passed and targets[here].mesh.size > 1:
                sides = [(side.mesh, side.target.shares) for side in targets[here : here + 2]]
                passes_shards = sides[0] == sides[1]
            result = self._plan_stage(stage, budgets[here], pins, received, passes_shards)
            planned.append(result)
            received = [result.plan.output_placements[name] for name, _ in result.passed] if passes_shards else None
        return planned

    def _pin_tied_parameters(
        self, stages: Sequence[StageModule], budgets: Sequence[StageBudget], ranks_of: Sequence[int]
    ) -> dict[str, tuple[Placement, ...]]:
        """Return placements of the parameters that several stages hold: those chosen by the last of these stages."""
        pins: dict[str, tuple[Placement, ...]] = {}
        # The last holder is usually the output layer, which has the most compute with the parameter. Gradients are
        # summed over the holders shard by shard, once per step; the last holder's plan includes that.
        for stage in reversed(stages):
            new = [name for name, holders in stage.shared.items() if holders[-1] == stage.index]
            if new:
                budget = budgets[stage.index]
                self._check_same_mesh(stage, budgets)
                ranks = {name: len({ranks_of[holder] for holder in stage.shared[name]}) for name in new}
                # Prices are per microbatch, but the sum is taken once per step.
                summed = {
                    name: 0.0 if self.links is None else self.links.sum_per_byte(count) / budget.microbatches
                    for name, count in ranks.items()
                }
                alone = self._plan_or_relax(stage, budget, pins, self.targets[budget.target].target, summed)
                pins.update({name: alone.plan.placements[name] for name in new})
        return pins

    def _check_same_mesh(self, stage: StageModule, budgets: Sequence[StageBudget]) -> None:
        """Raise `PlanError` if stages share parameters and have meshes of different shapes."""
        for name, holders in stage.shared.items():
            meshes = [self.targets[budgets[holder].target].mesh for holder in holders]
            if len(set(meshes)) > 1:
                raise PlanError(
                    f"parameter {name} is tied: stages {', '.join(map(str, holders))} hold it, which have the meshes "
                    f"{', '.join(map(str, meshes))}. What stages share has to lie alike on all: let them ask for "
                    "equally many devices."
                )

    def _plan_stage(
        self,
        stage: StageModule,
        budget: StageBudget,
        pins: Pins,
        received: Sequence[tuple[Placement, ...]] | None,
        passes_shards: bool,
    ) -> PlannedStage:
        """Plan a stage that receives tensors in given placements, or whole, and passes on shards, or whole tensors."""
        target, mesh = self.targets[budget.target].target, self.targets[budget.target].mesh
        if received is not None:
            target = self._receiving_target(stage, received, target, mesh)
        if not passes_shards:
            return self._plan_or_relax(stage, budget, pins, target)
        target = replace(target, output_placements="planned")
        planned = self._plan_or_relax(stage, budget, pins, target)
        placements = {name: planned.plan.output_placements[name] for name, _ in planned.passed}
        # Messages have the same size on all ranks, or contain a rank's share of the samples: tensors in other unequal
        # parts are passed on whole.
        shared = planned.planner.constraints.shared
        shapes = {name: value.shape for (name, _), value in zip(planned.passed, stage.passed, strict=True)}
        uneven = [
            name for name, row in placements.items() if not parts_are_equal(shapes[name], Spec.of(*row), mesh, shared)
        ]
        if not uneven:
            return planned
        whole = dict.fromkeys(uneven, (Replicate(),) * mesh.ndim)
        return self._plan_or_relax(stage, budget, pins, replace(target, output_placements={**placements, **whole}))

    def _receiving_target(
        self, stage: StageModule, received: Sequence[tuple[Placement, ...]], target: Target, mesh: MeshShape
    ) -> Target:
        """Return the target of a stage that receives tensors in given placements; the model's inputs are whole."""
        graph = self._graph(stage, target)
        names = [leaf for leaf in graph.call.leaves if isinstance(leaf, str)]
        known = {source.name for source in graph.inputs if source.kind == "input"}
        whole = [(Replicate(),) * mesh.ndim] * (len(names) - len(received))
        pinned = {name: row for name, row in zip(names, [*received, *whole], strict=True) if name in known}
        return replace(target, inputs="local", input_placements=pinned)

    def _plan_or_relax(
        self,
        stage: StageModule,
        budget: StageBudget,
        pins: Pins,
        target: Target,
        summed: Mapping[str, float] | None = None,
    ) -> PlannedStage:
        """Plan a stage within its budget, or as lean as possible if the budget allows that.

        `summed` is as in `Constraints`.
        """
        if budget in self._smallest_peaks:
            budget = replace(budget, limit=self._smallest_peaks[budget])
        try:
            return self._plan_within_budget(stage, budget, pins, target, summed)
        except BudgetError as error:
            if not budget.or_leanest or error.peak is None:
                raise
            self._smallest_peaks[budget] = error.peak
            return self._plan_within_budget(stage, replace(budget, limit=error.peak), pins, target, summed)

    def _plan_within_budget(
        self, stage: StageModule, budget: StageBudget, pins: Pins, target: Target, summed: Mapping[str, float] | None
    ) -> PlannedStage:
        """Plan a stage; reuse the decisions for an equal request, if any."""
        graph = self._graph(stage, target)
        start = time.perf_counter()
        held = {source.name for source in graph.inputs if source.kind == "parameter"}
        known = {**self.pinned[budget.target], **pins}
        pinned = {name: placements for name, placements in known.items() if name in held}
        placements = {**pinned, **target.input_placements}
        summed = summed or {}
        # Everything that a plan depends on, without names: stages of equal layers have the same key.
        key = (
            structural_fingerprint(graph),
            task_graph_marks(graph),
            tuple(place for place, node in enumerate(graph.graph.nodes) if node.name in graph.kept),
            tuple((str(placements.get(source.name)), summed.get(source.name)) for source in graph.inputs),
            str(target.output_placements),
            target.inputs,
            budget,
        )
        settings = replace(
            target.settings,
            memory_limit=budget.limit,
            recompute=budget.recompute,
            gradient_steps=budget.microbatches,
            under_way=budget.under_way,
            reduced=budget.reduced,
            time_limit=self.time_limit,
        )
        target = replace(target, settings=settings)
        prices = budget.target, settings.runs_per_reduction
        planner = planner_for(
            stage.module, graph, self.targets[budget.target].mesh, target, like=self._planner_by_target.get(prices)
        )
        self._planner_by_target.setdefault(prices, planner)
        planner.constraints = replace(
            planner.constraints, pinned={**planner.constraints.pinned, **pinned}, summed=summed
        )
        unlimited_key = *key[:-1], replace(budget, limit=None, or_leanest=False)
        earlier = self._earlier_planners.get(unlimited_key)
        # Plans refer to nodes, so those of an equal graph cannot be used.
        if earlier is not None and earlier.graph is graph:
            planner.met, planner.unlimited = earlier.met, earlier.unlimited
        self._earlier_planners.setdefault(unlimited_key, planner)
        plan = self._sharding_plan(planner, self._known_stages.get(key), target)
        planned = PlannedStage(stage, graph, planner, plan)
        # A plan cut short by Ctrl-C is not kept for other stages.
        if planner.interrupted:
            raise KeyboardInterrupt
        self._known_stages.setdefault(key, planned)
        self.seconds["plan"] += time.perf_counter() - start
        return planned

    def _sharding_plan(self, planner: Planner, alike: PlannedStage | None, target: Target) -> ShardingPlan:
        """Run a planner, or apply the decisions of an equal stage to its graph."""
        target = replace(target, hints=self.hints)
        if alike is None:
            # Other limits are tried after one that is too low, so the error need not explain what would help.
            return run_planner(planner, 0.0, target, planner.unlimited, explained=target.settings.memory_limit is None)
        source, plan = alike.graph, alike.plan
        if plan.recomputed:
            names = {
                item.name: like.name
                for items in (layers_of, lambda graph: graph.graph.nodes)
                for item, like in zip(items(source), items(planner.graph), strict=True)
            }
            source = recompute_layers(source, plan.recomputed)
            planner = recomputing_planner(planner, [names[name] for name in plan.recomputed])
        decisions = rename_decisions(Decisions.from_data(plan.decisions), source, planner.graph)
        candidate = planner.evaluate(decisions, plan.cost, plan.lower_bound, plan.method)
        return with_provenance(planner.describe(candidate), planner, 0.0, target)

    def _graph(self, stage: StageModule, target: Target) -> JointGraph:
        """Return a stage's step with hints, and marks in the model's code, on recomputed or kept values applied."""
        if stage.step not in self._steps:
            self._steps[stage.step] = with_regions(stage.step, None, ())
        return self._steps[stage.step]


# The maximum number of limits among equal stages: each needs another plan.
_LIMITS = 4


@dataclass(frozen=True, slots=True)
class RelaxedFit:
    """Planned stages, and their available memory.

    Attributes:
        planned: the stages.
        costs: the costs of the stages.
        flights: the number of microbatches in flight in every stage.
        microbatches: the number per step.
        memories: the memory in bytes of a device of every pipeline rank.
        halves: between the halves of its backward, a microbatch may keep more bytes than before; the fraction of these
            bytes for which limits leave room.
    """

    planned: Sequence[PlannedStage]
    costs: Sequence[StageCosts]
    flights: Sequence[int]
    microbatches: int
    memories: Sequence[float]
    halves: float = 0.0

    def limit_budgets(self, budgets: Sequence[StageBudget]) -> list[StageBudget]:
        """Return the budgets, with limits for the stages of ranks that have too little memory."""
        ranks = placement(len(self.memories), len(self.costs) // len(self.memories))
        # Only the receive buffers: the needs include what the stages themselves hold.
        received = rest_bytes([replace(cost, rest_bytes=0) for cost in self.costs], ranks, self.microbatches)
        needs = []
        for cost, count in zip(self.costs, self.flights, strict=True):
            kept = cost.saved_bytes + math.ceil(self.halves * max(cost.weight_saved_bytes - cost.saved_bytes, 0))
            needs.append(cost.rest_bytes + max(count * kept + cost.working_bytes, cost.application_bytes))
        limited = list(budgets)
        for stage, rank in enumerate(ranks):
            rank_need = sum(need for need, holder in zip(needs, ranks, strict=True) if holder == rank)
            room = self.memories[rank] - received[rank]
            if rank_need > room:
                # The stages of a rank share its memory in proportion to their needs. The limit applies to bytes counted
                # in the stage's plan, so other bytes of a pipeline's step are subtracted.
                further = (self.flights[stage] - budgets[stage].under_way) * self.costs[stage].saved_bytes
                beside = needs[stage] - self.planned[stage].plan.memory.peak - further
                limit = math.floor(needs[stage] / rank_need * room) - beside
                limited[stage] = replace(budgets[stage], limit=limit, under_way=self.flights[stage])
        return limited


Relaxation = Callable[[RelaxedFit, Sequence[StageBudget]], Sequence[StageBudget]]
"""Returns the budgets to try next, given those with which stages were planned."""


def relaxations(recompute: str) -> list[Relaxation]:
    """Return ways to make stages leaner, in the order of trying if nothing fits.

    * A limit with room for twice the microbatches in flight, as in schedules without bubbles, or for as many as
      possible. Nothing is recomputed.
    * Lower limits, with room for half or all of what these microbatches keep between the halves of backward.
    * A limit for the microbatches in flight in a 1F1B schedule.
    * All layers recomputed.
    * Gradients reduced with every microbatch if that makes them smaller, so that none is kept whole.
    * A limit in combination with these.

    Args:
        recompute: what the user allows to recompute, as for `autoshard.plan`.

    Source: P. Qi et al., "Zero Bubble Pipeline Parallelism", 2.2: with about twice the memory there is no bubble.
    """

    def limit_with_headroom(halves: float) -> Relaxation:
        def relax(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
            twice = [min(2 * count, fit.microbatches) for count in fit.flights]
            limited = replace(fit, flights=twice, halves=halves).limit_budgets(budgets)
            return _change_limited(budgets, limited, lambda budget: replace(budget, or_leanest=True), possible=True)

        return relax

    def limit(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        def allow_recompute(budget: StageBudget) -> StageBudget:
            # A stage in which operators are recomputed in any case is not changed.
            return budget if budget.recompute in ALWAYS_RECOMPUTE else replace(budget, recompute=recompute)

        return _change_limited(budgets, fit.limit_budgets(budgets), allow_recompute, possible=True)

    def recompute_layers(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        limited = fit.limit_budgets(budgets)
        return _change_limited(budgets, limited, lambda budget: _without_limit(budget, recompute="full"))

    def reduce_per_microbatch(fit: RelaxedFit, budgets: Sequence[StageBudget]) -> Sequence[StageBudget]:
        # A single microbatch has nothing to sum.
        if fit.microbatches == 1:
            return budgets
        limited = fit.limit_budgets(budgets)
        return _change_limited(budgets, limited, lambda budget: _without_limit(budget, reduced="microbatch"))

    # Sorted by cost in seconds.
    first = [limit_with_headroom(0.0), limit_with_headroom(0.5), limit_with_headroom(1.0), limit]
    return [*first, *([recompute_layers] if recompute == "auto" else []), reduce_per_microbatch, limit]


def _change_limited(
    budgets: Sequence[StageBudget],
    limited: Sequence[StageBudget],
    change: Callable[[StageBudget], StageBudget],
    *,
    possible: bool = False,
) -> list[StageBudget]:
    """Return the budgets, with changed limited ones for stages that must be limited.

    Args:
        budgets: the budgets of all stages.
        limited: the same with limits.
        change: changes a limited budget.
        possible: True to skip stages whose limit is not above 0.
    """

    def is_changed(budget: StageBudget, less: StageBudget) -> bool:
        return less != budget and less.limit is not None and (less.limit > 0 or not possible)

    return [change(less) if is_changed(budget, less) else budget for budget, less in zip(budgets, limited, strict=True)]


def _without_limit(budget: StageBudget, **changes: Any) -> StageBudget:
    return replace(budget, limit=None, under_way=1, **changes)


def merge_limits(budgets: Sequence[StageBudget], texts: Sequence[Hashable]) -> list[StageBudget]:
    """Return budgets in which equal stages have few different limits.

    Args:
        budgets: the budgets of all stages.
        texts: one per stage, equal for equal stages.
    """
    merged = list(budgets)
    groups: dict[Hashable, list[int]] = {}
    for stage, (budget, text) in enumerate(zip(budgets, texts, strict=True)):
        if budget.limit is not None:
            groups.setdefault((text, _without_limit(budget)), []).append(stage)
    # Stages with similar limits all get the smallest of these. Every limit needs another plan, and a pipeline is as
    # fast as its slowest stage, usually that with the least memory: more memory in other stages gains little.
    for stages in groups.values():
        stages.sort(key=lambda stage: (budgets[stage].limit or 0) / budgets[stage].under_way)
        size = math.ceil(len(stages) / _LIMITS)
        for near in (stages[first : first + size] for first in range(0, len(stages), size)):
            limit = min(budgets[stage].limit or 0 for stage in near)
            under_way = max(budgets[stage].under_way for stage in near)
            for stage in near:
                merged[stage] = replace(budgets[stage], limit=limit, under_way=under_way)
    return merged
