"""What serves one kind of call: its stages on this rank, parallelised, and torch's runtime of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.errors import PipelineError
from autoshard.options.target import Target
from autoshard.pipeline.graph.forward_export import export_forward
from autoshard.pipeline.graph.microbatch import batch_sizes, microbatches
from autoshard.pipeline.graph.stage_modules import StageModule, cut
from autoshard.pipeline.plan.boundaries import Boundaries, input_names
from autoshard.pipeline.plan.pipeline_devices import stage_clusters, stage_target
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.call_format import CallFormat
from autoshard.pipeline.run.position import pipeline_position
from autoshard.pipeline.run.stage_runtime import PipelineRuntime
from autoshard.pipeline.run.state_entries import StateEntry, relink_entries, state_entries
from autoshard.planner import hints as hint_rules
from autoshard.planner.module_planner import ModulePlanner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.parallelizer import Parallelizer
from autoshard.runtime.rank_agreement import on_all_ranks
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """One kind of call.

    Attributes:
        calls: how such calls look.
        stages: all stages; those of this rank alone, once it is in use.
        runtime: runs those of this rank.
        entries: where what those hold is in the pipeline module.
    """

    call_format: CallFormat
    stages: tuple[StageModule, ...]
    runtime: PipelineRuntime
    entries: tuple[StateEntry, ...] = ()


class CallCache:
    """Makes what serves calls.

    Args:
        model: the model; it may be without numbers once it has been served first.
        device_mesh: all axes.
        plan: the stages, for all calls.
        options: how calls that the plan does not know are planned.
        batch_dims: as `microbatches` takes them.

    Attributes:
        without_numbers: names of what is to be initialised: the model had it on the meta device from the start.
    """

    def __init__(
        self,
        model: nn.Module,
        device_mesh: DeviceMesh,
        plan: PipelinePlan,
        target: Target,
        batch_dims: Mapping[str, int | None] | None,
    ) -> None:
        self.model = model
        self.plan = plan
        self._position = pipeline_position(device_mesh, plan.layout)
        self.rank = self._position.rank
        self.group = self._position.group
        self.device_mesh = device_mesh
        self._mesh = self._position.mesh
        self._boundaries = Boundaries(plan.stages, MeshShape.of(self._mesh), self._mesh.get_coordinate() or [])
        self._target = target
        self._cluster = stage_clusters(target.cluster, plan.layout)[self.rank]
        self._batch_dims = batch_dims
        everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.uninitialized_names = frozenset(name for name, tensor in everything if tensor.is_meta)

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """The stages of a call with a whole batch; nothing is parallelised yet.

        Raises:
            InputError: the batch does not divide, or an input requires a gradient.
            PipelineError: it runs operators that the plan has no stage for.
        """
        plan, number = self.plan, self.plan.schedule.microbatches
        hinted = hint_rules.task_graphs(self._target.hints, [name for name, _ in self.model.named_modules()])
        part = microbatches(self.model, args, kwargs, number, self._batch_dims)[0]
        sizes = batch_sizes(self.model, *part, self._batch_dims) if plan.in_shares else None
        graph = export_forward(
            self.model, *part, task_graphs=hinted, mp_policy=self._target.options.mp_policy, dynamic=sizes
        )
        calls = CallFormat(self.model, graph, number, self._batch_dims)
        calls.check()
        names = {node.name for node in graph.operators}
        unknown = names - plan.stage_of.keys()
        if unknown:
            raise PipelineError(
                f"this call runs {len(unknown)} operators that the plan has no stage for, such as {min(unknown)}: the "
                f"plan was made for another kind of call. Make the pipeline with an example of this one."
            )
        stage_of = {name: stage for name, stage in plan.stage_of.items() if name in names}
        again = {name: stages for name, stages in plan.recomputed.items() if name in names}
        stages = tuple(cut(graph, stage_of, plan.schedule.stages, again))
        device = _current_device(self.device_mesh)
        held = [(stage, self._boundaries.messages(stage)) for stage in self.own_stages(stages)]
        return PreparedCall(calls, stages, PipelineRuntime(held, plan.schedule, self._position, device, calls.loss()))

    def own_stages(self, stages: tuple[StageModule, ...]) -> tuple[StageModule, ...]:
        """Those of this rank."""
        return tuple(stage for stage in stages if self.plan.schedule.placement[stage.index] == self.rank)

    def parallelize(self, serving: PreparedCall) -> None:
        """Shard the stages of this rank as the plan has it; in one of them on every rank, or in none."""

        def parallelize_stages() -> None:
            for stage in self.own_stages(serving.stages):
                plan = self.plan.stages[stage.index]
                parallelizer = self._parallelizer(serving, stage, plan)
                parallelizer.start(*stage.example)
                parallelizer.runtime.only_call = stage.example

        on_all_ranks(self.device_mesh, parallelize_stages)

    def _parallelizer(self, serving: PreparedCall, stage: StageModule, plan: ShardingPlan | None) -> Parallelizer:
        runtime, index = serving.runtime, stage.index
        options = stage_target(
            self._target, self._cluster, self.plan.stages[index], input_names(stage), stage.dynamic or None
        )
        steps, reduced = self.plan.microbatches, self.plan.reduced_at(index)
        options = replace(options, settings=replace(options.settings, gradient_steps=steps, reduced=reduced))
        return Parallelizer(
            stage.module,
            self._mesh,
            ModulePlanner(stage.module, MeshShape.of(self._mesh), options),
            plan,
            index,
            later=runtime.second_halves.get(index),
            sums=runtime.gradient_sums.get(index),
            reduced=reduced,
        )

    def prepare(self, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """What serves another kind of call on the parameters of `whole`, where they lie.

        Raises:
            PipelineError: as for `cut`, or a stage reads what its rank does not hold.
        """
        serving = self.cut(args, kwargs)
        found = self.state_entries(serving, whole)
        relink_entries(found)
        grad = torch.is_grad_enabled()

        def parallelize_stages() -> None:
            for stage in self.own_stages(serving.stages):
                parallelizer = self._parallelizer(serving, stage, None)
                parallelizer.placed = {
                    name: tuple(parameter.placements)
                    for name, parameter in stage.module.named_parameters()
                    if isinstance(parameter, DTensor)
                }
                example = (
                    stage.example if grad else pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, stage.example)
                )
                parallelizer.start(*example)
                parallelizer.runtime.only_call = example

        on_all_ranks(self.device_mesh, parallelize_stages)
        return replace(serving, stages=self.own_stages(serving.stages), entries=found)

    def state_entries(self, serving: PreparedCall, whole: nn.Module) -> tuple[StateEntry, ...]:
        """Where what the stages of this rank hold is in `whole`."""
        constants = serving.call_format.constants
        return tuple(
            entry
            for stage in self.own_stages(serving.stages)
            for entry in state_entries(stage.module, whole, constants)
        )


def _current_device(device_mesh: DeviceMesh) -> torch.device:
    """The device of this rank, by its number: a thread that another device is current in means the same by it."""
    kind = device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
