"""The plans of the stages of one cut: every stage by the planner of ordinary modules, on the mesh of its ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.distributed.tensor import Placement, Replicate

from autoshard.capture.joint import JointGraph
from autoshard.capture.layers import Layer
from autoshard.capture.layers import layers as layers_of
from autoshard.capture.recomputation import recompute_layers
from autoshard.errors import BudgetError, PlanError
from autoshard.options import Hints
from autoshard.options.target import Target
from autoshard.patterns.decisions import Decisions
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.pipeline.plan.boundaries import parts_are_equal
from autoshard.pipeline.plan.captures import StageCaptures
from autoshard.pipeline.plan.planned_stage import Links, PlannedStage
from autoshard.pipeline.plan.stage_reuse import rename_decisions, structural_fingerprint, task_graph_marks
from autoshard.planner.planner import Planner
from autoshard.planner.planning import planner_for, run_planner, with_provenance
from autoshard.planner.recompute_search import recomputing_planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.reshard.deferred_reductions import DeferredReduction
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

BoundaryMode = Literal["whole", "planned"]
Pins = Mapping[str, tuple[Placement | None, ...]]


@dataclass(frozen=True, slots=True)
class StageBudget:
    """What planning a stage is told of its devices, and of what else it shares with the rest of the step.

    Attributes:
        limit: bytes that the stage's step may reach; None for no limit.
        under_way: microbatches that are under way then, each of which holds what it saves.
        recompute: what its backward half may run again, as `autoshard.plan` takes it.
        kind: of the devices, by its place among the options of the `StagePlanner`.
        microbatches: over which its gradients are added up.
        reduced: which of these are reduced once.
        or_leanest: whether the leanest plan found will do where none keeps the limit.
    """

    limit: int | None
    recompute: str
    kind: int = 0
    microbatches: int = 1
    reduced: DeferredReduction = "step"
    under_way: int = 1
    or_leanest: bool = False


@dataclass(frozen=True, slots=True)
class StageTarget:
    """What a stage may run on, and how it is planned there.

    Attributes:
        options: their cluster is that of its ranks, and they have no hints of their own.
        mesh: of one stage.
    """

    target: Target
    mesh: MeshShape


class StagePlanner:
    """Plans stages, equal ones once.

    Args:
        kinds: of devices that there are.
        pinned: for each of them placements of parameters by their first names, as hints pin them.
        hints: of the user, as the plans of stages tell them.
        boundaries: `"whole"`: what goes from stage to stage is whole on all devices; `"planned"`: it lies as the
            earlier one makes it.
        captures: of stages of the same model that were planned before.
        links: along the pipeline, over which gradients of tied parameters are added up; free by default.

    Attributes:
        seconds: that captures and plans took.
        time_limit: seconds of the search of one stage's plan.
    """

    def __init__(
        self,
        kinds: Sequence[StageTarget],
        pinned: Sequence[Pins],
        hints: Hints | None,
        boundaries: BoundaryMode,
        captures: StageCaptures | None = None,
        links: Links | None = None,
    ) -> None:
        self.links = links
        self.targets = tuple(kinds)
        self.time_limit = kinds[0].target.settings.time_limit
        self.pinned = tuple(pinned)
        self.hints = hints
        self.has_planned_boundaries = boundaries == "planned"
        self.seconds: dict[str, float] = {"capture": 0.0, "plan": 0.0}
        self._captures = captures or StageCaptures()
        # What one works out for operators and reshards serves others: of the same devices, that price reductions so.
        self._planner_by_target: dict[tuple[int, int], Planner] = {}
        self._known_stages: dict[Any, PlannedStage] = {}
        self._earlier_planners: dict[Any, Planner] = {}  # those that planned a stage with another limit, or none
        self._smallest_peaks: dict[StageBudget, int] = {}  # smallest peaks found in rooms that were too small

    def plan(
        self, stages: Sequence[StageModule], rooms: Sequence[StageBudget], ranks_of: Sequence[int] = ()
    ) -> list[PlannedStage]:
        """Plan all stages of a cut.

        Parameters that several stages hold lie on all of them as the last of these would have them, which most often
        is the output layer that computes most with it: their gradients are added shard by shard, which counts there,
        once per step. Where boundaries are
        planned, what a stage hands on lies as it comes out, and the next one takes it so: whatever it takes to have it
        otherwise is part of the next one's plan, on the links inside a stage (Whale's bridge).

        Args:
            stages: in their order.
            rooms: memory of every stage.
            ranks_of: pipeline ranks of all stages; one each by default.

        Raises:
            BudgetError: a stage can't be planned within its room.
            KeyboardInterrupt: Ctrl-C, be there a plan of the stage that is being planned or not.
        """
        pins = self._pin_tied_parameters(stages, rooms, ranks_of or range(len(stages)))
        planned: list[PlannedStage] = []
        kinds = [self.targets[room.kind] for room in rooms]
        taken = None
        for stage in stages:
            here = stage.index
            # What lies in other shares than the next stage has, or on another mesh, is whole where it crosses.
            leaves = (
                self.has_planned_boundaries and bool(stage.passed) and _can_pass_shards(kinds[here], kinds[here + 1])
            )
            one = self._plan_stage(stage, rooms[here], pins, taken, leaves)
            planned.append(one)
            taken = [one.plan.output_placements[name] for name, _ in one.passed] if leaves else None
        return planned

    def _pin_tied_parameters(
        self, stages: Sequence[StageModule], rooms: Sequence[StageBudget], ranks_of: Sequence[int]
    ) -> dict[str, tuple[Placement, ...]]:
        """Placements of the parameters that several stages hold."""
        settled: dict[str, tuple[Placement, ...]] = {}
        for stage in reversed(stages):
            new = [name for name, holders in stage.shared.items() if holders[-1] == stage.index]
            if new:
                room = rooms[stage.index]
                self._check_same_mesh(stage, rooms)
                ranks = {name: len({ranks_of[holder] for holder in stage.shared[name]}) for name in new}
                summed = {name: self._seconds_per_byte(count) / room.microbatches for name, count in ranks.items()}
                alone = self._plan_or_relax(stage, room, settled, self.targets[room.kind].target, summed)
                settled.update({name: alone.plan.placements[name] for name in new})
        return settled

    def _check_same_mesh(self, stage: StageModule, rooms: Sequence[StageBudget]) -> None:
        """`PlanError` where stages share parameters, and do not lie on meshes of the same shape."""
        for name, holders in stage.shared.items():
            meshes = [self.targets[rooms[holder].kind].mesh for holder in holders]
            if len(set(meshes)) > 1:
                raise PlanError(
                    f"parameter {name} is tied: stages {', '.join(map(str, holders))} hold it, which have the meshes "
                    f"{', '.join(map(str, meshes))}. What stages share has to lie alike on all: let them ask for "
                    "equally many devices."
                )

    def _seconds_per_byte(self, ranks: int) -> float:
        return 0.0 if self.links is None else self.links.sum_per_byte(ranks)

    def _plan_stage(
        self,
        stage: StageModule,
        room: StageBudget,
        pins: Pins,
        taken: Sequence[tuple[Placement, ...]] | None,
        leaves: bool,
    ) -> PlannedStage:
        """The plan of a stage that receives tensors as they are `taken`, or whole; others it `leaves` as they come."""
        options, mesh = self.targets[room.kind].target, self.targets[room.kind].mesh
        if taken is not None:
            options = self._receiving_target(stage, taken, options, mesh)
        if not leaves:
            return self._plan_or_relax(stage, room, pins, options)
        options = replace(options, output_placements="planned")
        one = self._plan_or_relax(stage, room, pins, options)
        placed = {name: one.plan.output_placements[name] for name, _ in one.passed}
        # Messages have one size, or hold a rank's share of the samples: what would lie in other unequal parts is whole.
        shared = one.planner.constraints.shared
        shapes = {name: value.shape for (name, _), value in zip(one.passed, stage.passed, strict=True)}
        uneven = [
            name for name, row in placed.items() if not parts_are_equal(shapes[name], Spec.of(*row), mesh, shared)
        ]
        if uneven:
            whole = dict.fromkeys(uneven, (Replicate(),) * mesh.ndim)
            one = self._plan_or_relax(stage, room, pins, replace(options, output_placements={**placed, **whole}))
        return one

    def _receiving_target(
        self, stage: StageModule, taken: Sequence[tuple[Placement, ...]], target: Target, mesh: MeshShape
    ) -> Target:
        """The options of a stage that receives tensors so; the model's inputs are whole everywhere."""
        graph = self._graph(stage, target)
        names = [leaf for leaf in graph.call.leaves if isinstance(leaf, str)]
        known = {source.name for source in graph.inputs if source.kind == "input"}
        whole = [(Replicate(),) * mesh.ndim] * (len(names) - len(taken))
        pinned = {name: row for name, row in zip(names, [*taken, *whole], strict=True) if name in known}
        return replace(target, inputs="local", input_placements=pinned)

    def _plan_or_relax(
        self,
        stage: StageModule,
        room: StageBudget,
        pins: Pins,
        target: Target,
        summed: Mapping[str, float] | None = None,
    ) -> PlannedStage:
        """A plan within the room, or the leanest there is where that will do; `summed` as in `Constraints`."""
        if room in self._smallest_peaks:
            room = replace(room, limit=self._smallest_peaks[room])
        try:
            return self._plan_within_budget(stage, room, pins, target, summed)
        except BudgetError as error:
            if not room.or_leanest or error.peak is None:
                raise
            self._smallest_peaks[room] = error.peak
            return self._plan_within_budget(stage, replace(room, limit=error.peak), pins, target, summed)

    def _plan_within_budget(
        self, stage: StageModule, room: StageBudget, pins: Pins, target: Target, summed: Mapping[str, float] | None
    ) -> PlannedStage:
        """A plan, or that of a stage that is alike and asked the same."""
        graph = self._graph(stage, target)
        start = time.perf_counter()
        held = {source.name for source in graph.inputs if source.kind == "parameter"}
        known = {**self.pinned[room.kind], **pins}
        pinned = {name: placements for name, placements in known.items() if name in held}
        asked = {**pinned, **target.input_placements}
        summed = summed or {}
        places = [(str(asked.get(source.name)), summed.get(source.name)) for source in graph.inputs]
        key = (
            structural_fingerprint(graph),
            task_graph_marks(graph),
            tuple(places),
            str(target.output_placements),
            target.inputs,
            room,
        )
        settings = replace(
            target.settings,
            memory_limit=room.limit,
            recompute=room.recompute,
            gradient_steps=room.microbatches,
            under_way=room.under_way,
            reduced=room.reduced,
            time_limit=self.time_limit,
        )
        target = replace(target, settings=settings)
        serves = room.kind, settings.runs_per_reduction
        planner = planner_for(
            stage.module, graph, self.targets[room.kind].mesh, target, like=self._planner_by_target.get(serves)
        )
        self._planner_by_target.setdefault(serves, planner)
        planner.constraints = replace(
            planner.constraints, pinned={**planner.constraints.pinned, **pinned}, summed=summed
        )
        free = *key[:-1], replace(room, limit=None, or_leanest=False)
        earlier = self._earlier_planners.get(free)
        if earlier is not None and earlier.graph is graph:
            planner.plan_cache, planner.unlimited = earlier.plan_cache, earlier.unlimited
        self._earlier_planners.setdefault(free, planner)
        one = PlannedStage(stage, graph, planner, self._sharding_plan(planner, self._known_stages.get(key), target))
        if planner.interrupted:
            raise KeyboardInterrupt
        self._known_stages.setdefault(key, one)
        self.seconds["plan"] += time.perf_counter() - start
        return one

    def _sharding_plan(self, planner: Planner, alike: PlannedStage | None, target: Target) -> ShardingPlan:
        said = replace(target, hints=self.hints)
        if alike is None:
            # Where a limit is too low, others are tried: nobody asks what would help.
            return run_planner(planner, 0.0, said, planner.unlimited, explained=target.settings.memory_limit is None)
        made = alike.graph
        if alike.plan.recomputed:
            layers = dict(zip(map(_name, layers_of(made)), map(_name, layers_of(planner.graph)), strict=True))
            made = recompute_layers(made, alike.plan.recomputed)
            planner = recomputing_planner(planner, [layers[name] for name in alike.plan.recomputed])
        decisions = rename_decisions(Decisions.from_data(alike.plan.decisions), made, planner.graph)
        found = planner.evaluate(decisions, alike.plan.cost, alike.plan.lower_bound, alike.plan.method)
        return with_provenance(planner.describe(found), planner, 0.0, said)

    def _graph(self, stage: StageModule, target: Target) -> JointGraph:
        start = time.perf_counter()
        graph = self._captures.joint_graph(stage, dynamic=target.shares is not None)
        self.seconds["capture"] += time.perf_counter() - start
        return graph


def _can_pass_shards(one: StageTarget, other: StageTarget) -> bool:
    """Whether what stages of one kind leave in parts can be taken so by those of the other."""
    return one.mesh.size > 1 and (one.mesh, one.target.shares) == (other.mesh, other.target.shares)


def _name(layer: Layer) -> str:
    return layer.name
