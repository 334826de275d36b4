"""Calls of one kind prepared to run: the parallelised stages of this rank, and torch's runtime of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from autoshard.pipeline.graph.microbatch import BatchCall
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
from autoshard.runtime.call_tensors import describe_call
from autoshard.runtime.parallelizer import Parallelizer
from autoshard.runtime.rank_agreement import check_ranks_agree, on_all_ranks
from autoshard.specs.axes import MeshShape


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A kind of call that can be run.

    Attributes:
        call_format: of such calls.
        stages: all stages; once it is in use, those of this rank.
        runtime: runs the stages of this rank.
        entries: the parameters and buffers of these stages in the pipeline module.
    """

    call_format: CallFormat
    stages: tuple[StageModule, ...]
    runtime: PipelineRuntime
    entries: tuple[StateEntry, ...] = ()


class CallCache:
    """Prepares kinds of calls.

    Args:
        model: the model; it may be on the meta device once its first kind of call is prepared.
        device_mesh: all axes.
        plan: the stages, for all calls.
        target: for the stages of calls that the plan does not have.
        batch_dims: as of `BatchCall`.

    Attributes:
        uninitialized_names: of parameters and buffers that the model had on the meta device from the start.
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
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.uninitialized_names = frozenset(name for name, tensor in tensors if tensor.is_meta)

    def compare_calls(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check that all ranks make the same call.

        Raises:
            InputError: they do not; raised on every rank.
        """
        check_ranks_agree(
            self.device_mesh,
            describe_call(self.model, args, kwargs, torch.is_grad_enabled()),
            "All ranks call the pipeline alike, each with the whole batch.",
        )

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """Cut a call with a whole batch into stages; nothing is parallelised yet.

        Raises:
            InputError: the batch does not divide, or an input requires a gradient.
            PipelineError: the call runs operators that the plan has no stage for.
        """
        plan, number = self.plan, self.plan.schedule.microbatches
        hinted = hint_rules.task_graphs(self._target.hints, [name for name, _ in self.model.named_modules()])
        part = BatchCall(self.model, args, kwargs, self._batch_dims).split(number)[0]
        graph = export_forward(
            self.model,
            part.args,
            part.kwargs,
            task_graphs=hinted,
            mp_policy=self._target.options.mp_policy,
            dynamic=part.dynamic_sizes if plan.in_shares else None,
        )
        call_format = CallFormat(self.model, graph, number, self._batch_dims)
        call_format.check()
        names = {node.name for node in graph.operators}
        unknown = names - plan.stage_of.keys()
        if unknown:
            raise PipelineError(
                f"this call runs {len(unknown)} operators that the plan has no stage for, such as {min(unknown)}: the "
                f"plan was made for another kind of call. Make the pipeline with an example of this one."
            )
        stage_of = {name: stage for name, stage in plan.stage_of.items() if name in names}
        recomputed = {name: stages for name, stages in plan.recomputed.items() if name in names}
        stages = tuple(cut(graph, stage_of, plan.schedule.stages, recomputed))
        held = [(stage, self._boundaries.messages(stage)) for stage in self.own_stages(stages)]
        device = _current_device(self.device_mesh)
        runtime = PipelineRuntime(held, plan.schedule, self._position, device, call_format.loss())
        return PreparedCall(call_format, stages, runtime)

    def own_stages(self, stages: Sequence[StageModule]) -> tuple[StageModule, ...]:
        """Return the stages of this rank."""
        return tuple(stage for stage in stages if self.plan.schedule.placement[stage.index] == self.rank)

    def parallelize(self, prepared: PreparedCall) -> None:
        """Shard the stages of this rank as planned; on every rank, or on none if one fails."""

        def parallelize_stages() -> None:
            for stage in self.own_stages(prepared.stages):
                parallelizer = self._parallelizer(prepared, stage, self.plan.stages[stage.index])
                parallelizer.start(*stage.example)
                parallelizer.runtime.only_call = stage.example

        on_all_ranks(self.device_mesh, parallelize_stages)

    def _parallelizer(self, prepared: PreparedCall, stage: StageModule, plan: ShardingPlan | None) -> Parallelizer:
        runtime, index = prepared.runtime, stage.index
        target = stage_target(
            self._target, self._cluster, self.plan.stages[index], input_names(stage), stage.dynamic or None
        )
        steps, reduced = self.plan.microbatches, self.plan.reduced_at(index)
        target = replace(target, settings=replace(target.settings, gradient_steps=steps, reduced=reduced))
        return Parallelizer(
            stage.module,
            self._mesh,
            ModulePlanner(stage.module, MeshShape.of(self._mesh), target),
            plan,
            index,
            later=runtime.second_halves.get(index),
            sums=runtime.gradient_sums.get(index),
            reduced=reduced,
        )

    def prepare(self, whole: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """Prepare another kind of call, on the parameters of `whole` with their present placements.

        Raises:
            PipelineError: as for `cut`, or a stage reads a parameter that its rank does not hold.
        """
        prepared = self.cut(args, kwargs)
        entries = self.state_entries(prepared, whole)
        relink_entries(entries)
        grad = torch.is_grad_enabled()

        def parallelize_stages() -> None:
            for stage in self.own_stages(prepared.stages):
                parallelizer = self._parallelizer(prepared, stage, None)
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
        return replace(prepared, stages=self.own_stages(prepared.stages), entries=entries)

    def state_entries(self, prepared: PreparedCall, whole: nn.Module) -> tuple[StateEntry, ...]:
        """Return the entries in `whole` of the parameters and buffers of this rank's stages."""
        constants = prepared.call_format.constants
        return tuple(
            entry
            for stage in self.own_stages(prepared.stages)
            for entry in state_entries(stage.module, whole, constants)
        )


def _current_device(device_mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank with its index: threads may have another current device."""
    kind = device_mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
