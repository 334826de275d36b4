"""Steps of one rank's stages, run by torch's pipeline stages and its runtime for lists of actions.

A `CallCache` prepares kinds of calls: it cuts a call into stages, parallelizes this rank's, and passes them to a
`PipelineRuntime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.capture.bound_call import BoundCall
from autoshard.errors import AutoshardError, PipelineError, summary_of
from autoshard.options.target import Target
from autoshard.pipeline._torch import ActionsRuntime, MultiPeerStage, check_messages, make_group
from autoshard.pipeline.graph.microbatch import BatchCall, CallFormat, Inputs, Loss, loss_shares
from autoshard.pipeline.graph.stage_slices import StageModule, cut
from autoshard.pipeline.plan.pipeline_devices import PipelineMesh, stage_clusters, stage_target
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.planned_stage import Boundaries, Tensors, input_names
from autoshard.pipeline.plan.stage_reuse import captured_microbatch
from autoshard.pipeline.run.stage_planner import StageStepPlanner
from autoshard.pipeline.run.stage_state import StateEntry, relink_entries, state_entries
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule, runtime_actions
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.calls import describe_call
from autoshard.runtime.gradient_sums import GradientSums
from autoshard.runtime.module_runtime import Runtime
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.rank_agreement import check_ranks_agree, on_all_ranks, process_rank
from autoshard.specs.axes import MeshShape

# The end of an error about calls that differ between ranks.
ADVICE = "All ranks call the pipeline alike, each with the whole batch."

_FORWARD = (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePosition:
    """The position of a process in a pipeline.

    Attributes:
        rank: its pipeline rank.
        mesh: the mesh of the stages on that rank.
        group: one process of every pipeline rank, in order, including this one; it receives from these.
        axis_group: all processes along the pipeline's axis.
        sends: for the previous pipeline rank (-1) and the next one (1), the global ranks of the processes to which this
            one sends; empty if they are those in `group`.
        starts: for every pipeline rank, the index of its first process in `axis_group`.
    """

    rank: int
    mesh: DeviceMesh
    group: dist.ProcessGroup
    axis_group: dist.ProcessGroup
    sends: dict[int, tuple[int, ...]]
    starts: tuple[int, ...]


def pipeline_position(device_mesh: DeviceMesh, layout: PipelineMesh) -> PipelinePosition:
    """Return the position of this process. All processes of the mesh call this together, because it creates groups.

    Source: Rhino 6.3: communicators are created once, in the same order on every rank.
    """
    axis_group = device_mesh.get_group(layout.axis)
    place = device_mesh.get_local_rank(layout.axis)
    rank = layout.rank_at(place)
    mesh = _rank_mesh(device_mesh, layout, rank)
    if max(layout.devices) == 1:
        return PipelinePosition(rank, mesh, axis_group, axis_group, {}, layout.starts)
    group = _column_group(device_mesh, layout)
    index = place - layout.starts[rank]
    axis_ranks = dist.get_process_group_ranks(axis_group)
    # Pipeline ranks may have unequal numbers of devices. Every process receives from one process on the previous rank
    # and one on the next, assigned round-robin, and sends to those that receive from it.
    sends = {
        step: tuple(
            axis_ranks[layout.starts[rank + step] + receiver]
            for receiver in range(layout.devices[rank + step])
            if receiver % layout.devices[rank] == index
        )
        for step in (-1, 1)
        if 0 <= rank + step < layout.ranks
    }
    return PipelinePosition(rank, mesh, group, axis_group, sends, layout.starts)


def _rank_mesh(device_mesh: DeviceMesh, layout: PipelineMesh, rank: int) -> DeviceMesh:
    """Return the mesh of the stages on this process's pipeline rank."""
    start, count = layout.starts[rank], layout.devices[rank]
    names = layout.stage(rank).names
    others = tuple(name for name in names if name in layout.whole.names)
    if others and max(layout.devices) == 1:
        return device_mesh[others]
    # Every process creates this group, needed or not: all need equal numbers of groups (see `_column_group`).
    axis_ranks = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    group = dist.new_group(axis_ranks[start : start + count], use_local_synchronization=True)
    if count == 1:
        if others:
            return device_mesh[others]
        return DeviceMesh.from_group(group, device_mesh.device_type, mesh_dim_names=names)
    groups = [group if name == layout.axis else device_mesh.get_group(name) for name in names]
    ranks = device_mesh.mesh.narrow(layout.whole.index(layout.axis), start, count)
    return DeviceMesh.from_group(groups, device_mesh.device_type, mesh=ranks, mesh_dim_names=names)


def _column_group(device_mesh: DeviceMesh, layout: PipelineMesh) -> dist.ProcessGroup:
    """Return the group of this process and those that it receives from, one on every other pipeline rank."""
    axis_ranks = dist.get_process_group_ranks(device_mesh.get_group(layout.axis))
    this_rank = process_rank()
    groups: list[dist.ProcessGroup] = []
    # The n-th process of a pipeline rank is in the n-th group; ranks with fewer processes are assigned round-robin.
    # Torch names a group after its ranks and the number of groups in the process, so a process outside a group creates
    # one with itself alone.
    for turn in range(max(layout.devices)):
        members = [axis_ranks[start + turn % count] for start, count in zip(layout.starts, layout.devices, strict=True)]
        is_member = this_rank in members
        group = make_group(members if is_member else [this_rank])
        groups += [group] if is_member else []
    return groups[0]


class StageCall(nn.Module):
    """A stage as torch's runtime calls it: with received tensors, and all inputs of the model by name."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.module = stage.module
        self.keywords = {keyword: name for name, (keyword, _) in stage.inputs.items()}

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keywords = {keyword: inputs[name] for keyword, name in self.keywords.items()}
        results = self.module(*received, **keywords)
        # Messages must be contiguous.
        return tuple(result.contiguous() for result in results)


class PipelineRuntime:
    """Runs steps of this rank's stages.

    Torch's runtime runs a list of actions, so every rank follows the order of the schedule, messages included, whether
    or not it is one of torch's schedules.

    Args:
        stages: this rank's stages, with the tensors that each receives and returns here, on the meta device.
        schedule: the orders of all ranks.
        position: this process's position in the pipeline.
        device: the device of the stages.
        loss: the output of the model that is differentiated; None if there is none.

    Attributes:
        second_halves: if the schedule splits backward, one list per stage to which its backwards append the work for
            the second half. (Torch splits backward by walking the autograd graph of a stage. That of a parallelised
            stage is one operation, which torch would run twice, once per half.)
        gradient_sums: for every stage, the gradients that its last backward reduces once per step; empty with a single
            microbatch. The reductions are awaited at the end of the step, so that other stages of the rank can compute
            in the meantime.

    Raises:
        PipelineError: ranks of the schedule wait for one another, or its last stage takes microbatches out of order.
    """

    def __init__(
        self,
        stages: Sequence[tuple[StageModule, tuple[Tensors, Tensors]]],
        schedule: Schedule,
        position: PipelinePosition,
        device: torch.device,
        loss: Loss | None,
    ) -> None:
        self.schedule = schedule
        self.loss = loss
        self._calls = [(stage.index, StageCall(stage), messages) for stage, messages in stages]
        self._position = position
        self._group = position.group
        self._device = device
        self._orders = runtime_actions(schedule)
        self.second_halves: dict[int, list[Callable[[], None]]] = (
            {stage.index: [] for stage, _ in stages} if schedule.splits_backward else {}
        )
        number = schedule.microbatches
        self.gradient_sums = {stage.index: GradientSums(number) for stage, _ in stages} if number > 1 else {}
        _check_microbatch_order(schedule)

    # Each has its own buffers, so it is created when the first step of its kind runs.
    @cached_property
    def _training(self) -> ActionsRuntime:
        return self._build_runtime(self._orders)

    @cached_property
    def _evaluating(self) -> ActionsRuntime:
        parts = [[part for action in order for part in action.computations] for order in self._orders]
        return self._build_runtime([[part for part in order if part.kind in _FORWARD] for order in parts])

    def train(self, microbatches: Sequence[Inputs]) -> torch.Tensor:
        """Run forward and backward of all microbatches, and add the gradients of the batch's loss to `.grad`.

        Args:
            microbatches: the inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank of the group.

        Raises:
            PipelineError: the step failed, for example because another rank died; no step can follow it.
        """
        assert self.loss is not None, "there is no loss to differentiate"
        losses, _ = self._step(self._training, microbatches, backward=True)
        return self._sum_from_last_stage(self.loss, losses)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Inputs]) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, ...]]]:
        """Run forward of all microbatches.

        Args:
            microbatches: the inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank, or None if the model has no loss; and on the rank of the last stage
            the outputs of each microbatch.
        """
        losses, outputs = self._step(self._evaluating, microbatches, backward=False)
        return (None if self.loss is None else self._sum_from_last_stage(self.loss, losses)), outputs

    def _step(
        self, runtime: ActionsRuntime, microbatches: Sequence[Inputs], backward: bool
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
        """Run one step."""
        # Ranks that wait for a dead one fail with closed connections; the error explains that.
        try:
            for sums in self.gradient_sums.values():
                sums.clear()
            # Only the rank of the last stage has the loss, and everything that the weights depend on.
            last = self.schedule.placement[-1] == dist.get_rank(self._group)
            count = self.loss.count if last and self.loss is not None else None
            results = runtime.run(microbatches, loss_shares(count, microbatches), backward)
            # Await the last backwards' reductions after all computations.
            for sums in self.gradient_sums.values():
                sums.run_deferred()
            return results
        except RuntimeError as error:
            # Torch wraps errors of a stage; the first cause has the user's line.
            cause = _first_cause(error)
            if isinstance(cause, AutoshardError):
                raise cause from error
            raise PipelineError(
                f"a step of the pipeline broke off on rank {dist.get_rank()} (rank {dist.get_rank(self._group)} of "
                f"{self.schedule.ranks} along the pipeline): {summary_of(cause)}\nIf a connection was "
                f"closed or timed out, another rank ended or hangs, and its own log says why. The ranks are no longer "
                f"at the same point: start all anew, from the last checkpoint."
            ) from error

    def _build_runtime(self, orders: Sequence[Sequence[Action]]) -> ActionsRuntime:
        """Return torch's runtime for some orders; its stages have their own receive buffers."""
        stages = [
            MultiPeerStage(
                call,
                index,
                self.schedule.stages,
                self._device,
                input_args=received,
                output_args=returned,
                group=self._group,
                dw_builder=partial(_pop_second_half, self.second_halves[index])
                if index in self.second_halves
                else None,
                line=self._position.axis_group,
                sends=self._position.sends,
            )
            for index, call, (received, returned) in self._calls
        ]
        texts = [[str(action) for action in order] for order in orders]
        loss = None if self.loss is None else self.loss.share
        return ActionsRuntime(stages, self.schedule.placement, texts, self.schedule.microbatches, loss)

    def _sum_from_last_stage(self, loss: Loss, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return, on every rank, the sum of the loss shares on the last stage's rank."""
        # Broadcast to all ranks, because a training loop may log the loss on any rank.
        total = torch.zeros((), dtype=loss.dtype, device=self._device)
        for share in shares:
            total += share.detach()
        source = self._position.starts[self.schedule.placement[-1]]
        dist.broadcast(total, group=self._position.axis_group, group_src=source)
        return total


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _pop_second_half(later: list[Callable[[], None]]) -> Callable[[], None]:
    """Return the second half of the last backward, or a no-op if there is none."""
    # Torch requests it after every backward for inputs, but not every backward has one.
    return later.pop() if later else lambda: None


def _check_microbatch_order(schedule: Schedule) -> None:
    """Raise `PipelineError` for an order in which torch would confuse the microbatches' losses."""
    last = schedule.stages - 1
    parts = [part for action in schedule.orders[schedule.placement[last]] for part in action.computations]
    turns = [part.microbatch for part in parts if part.stage == last and part.kind == ActionKind.FORWARD]
    if turns != list(range(schedule.microbatches)):
        raise PipelineError(
            f"schedule {schedule.name} runs the last stage forward for microbatches {turns}: torch's runtime needs "
            f"them in their order there."
        )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A kind of call that is ready to run.

    Attributes:
        call_format: the format of such calls.
        stages: all stages; in use, only this rank's.
        runtime: runs this rank's stages.
        texts: what must be the same on all ranks in such a call, as for `CallOrder.begin_known`.
        entries: the parameters and buffers of these stages in the pipeline module.
    """

    call_format: CallFormat
    stages: tuple[StageModule, ...]
    runtime: PipelineRuntime
    texts: Mapping[str, str]
    entries: tuple[StateEntry, ...] = ()


class CallCache:
    """Prepares kinds of calls.

    Args:
        model: the model; it may be on the meta device once the first kind of call is prepared.
        device_mesh: all axes.
        plan: the stages, for all calls.
        target: the target for stages of calls that the plan does not have.
        batch_dims: as for `BatchCall`.

    Attributes:
        uninitialized_names: names of parameters and buffers that were on the meta device from the start.
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

    def compare_calls(self, call: BoundCall) -> None:
        """Check that all ranks make the same call.

        Raises:
            InputError: they do not; raised on every rank.
        """
        check_ranks_agree(self.device_mesh, describe_call(call), ADVICE)

    def cut(self, call: BoundCall) -> PreparedCall:
        """Cut a call with a whole batch into stages, without parallelising them.

        Raises:
            InputError: the batch is not divisible, or an input requires a gradient.
            PipelineError: the call runs operators without a stage in the plan.
        """
        plan, number = self.plan, self.plan.schedule.microbatches
        batch = BatchCall(self.model, call.args, call.kwargs, self._batch_dims)
        # With gradients, which identify the loss; without them, stages have only forward halves.
        step = captured_microbatch(batch, number, self._target, dynamic=plan.in_shares)
        call_format = CallFormat(self.model, step, number, self._batch_dims)
        call_format.check()
        names = {each.name for each in step.operators}
        unknown = names - plan.stage_of.keys()
        if unknown:
            raise PipelineError(
                f"this call runs {len(unknown)} operators that the plan has no stage for, such as {min(unknown)}: the "
                f"plan was made for another kind of call. Make the pipeline with an example of this one."
            )
        stage_of = {name: stage for name, stage in plan.stage_of.items() if name in names}
        recomputed = {name: stages for name, stages in plan.recomputed.items() if name in step.tensors}
        stages = tuple(cut(step, stage_of, plan.schedule.stages, recomputed, grad=torch.is_grad_enabled()))
        step.slices.clear()  # the parameters of other ranks are freed
        held = [(stage, self._boundaries.messages(stage)) for stage in self.own_stages(stages)]
        device = torch.device(self.device_mesh.device_type)
        if device.type != "cpu":
            # With its index: torch's threads may have another current device.
            device = torch.device(device.type, torch.get_device_module(device.type).current_device())
        runtime = PipelineRuntime(held, plan.schedule, self._position, device, call_format.loss())
        return PreparedCall(call_format, stages, runtime, describe_call(call))

    def own_stages(self, stages: Sequence[StageModule]) -> tuple[StageModule, ...]:
        """Return this rank's stages."""
        return tuple(stage for stage in stages if self.plan.schedule.placement[stage.index] == self.rank)

    def parallelize(self, prepared: PreparedCall) -> None:
        """Shard this rank's stages as planned; on every rank, or on none if one fails."""
        self._parallelize(prepared, as_planned=True)

    def _parallelize(self, prepared: PreparedCall, *, as_planned: bool) -> None:
        """Parallelize this rank's stages by their plans, or by new ones for the current placements."""
        keeps_gradients = as_planned or torch.is_grad_enabled()

        def parallelize_stages() -> None:
            for stage in self.own_stages(prepared.stages):
                maker = self._program_maker(prepared, stage, self.plan.stages[stage.index] if as_planned else None)
                example = stage.example
                if not as_planned:
                    maker.placed = {
                        name: tuple(parameter.placements)
                        for name, parameter in stage.module.named_parameters()
                        if isinstance(parameter, DTensor)
                    }
                # Received tensors require gradients in the example; without gradients none does.
                if keeps_gradients:
                    check_messages(example[0])
                else:
                    example = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, example)
                runtime = Runtime(maker)
                call = BoundCall.of(stage.module, *example)
                runtime.start(call)
                runtime.programs.only_call = call

        on_all_ranks(self.device_mesh, parallelize_stages)

    def _program_maker(self, prepared: PreparedCall, stage: StageModule, plan: ShardingPlan | None) -> ProgramMaker:
        runtime, index = prepared.runtime, stage.index
        target = stage_target(
            self._target, self._cluster, self.plan.stages[index], input_names(stage), stage.dynamic or None
        )
        steps, reduced = self.plan.microbatches, self.plan.reduced_at(index)
        target = replace(target, settings=replace(target.settings, gradient_steps=steps, reduced=reduced))
        return ProgramMaker(
            stage.module,
            self._mesh,
            StageStepPlanner(stage, MeshShape.of(self._mesh), target),
            plan,
            index,
            later=runtime.second_halves.get(index),
            sums=runtime.gradient_sums.get(index),
            reduced=reduced,
        )

    def prepare(self, whole: nn.Module, call: BoundCall) -> PreparedCall:
        """Prepare another kind of call on the parameters of `whole` with their current placements.

        Raises:
            PipelineError: as for `cut`, or a stage reads a parameter that its rank does not hold.
        """
        prepared = self.cut(call)
        entries = self.state_entries(prepared, whole)
        relink_entries(entries)
        self._parallelize(prepared, as_planned=False)
        return replace(prepared, stages=self.own_stages(prepared.stages), entries=entries)

    def state_entries(self, prepared: PreparedCall, whole: nn.Module) -> tuple[StateEntry, ...]:
        """Return the entries in `whole` for the parameters and buffers of this rank's stages."""
        return tuple(
            entry for stage in self.own_stages(prepared.stages) for entry in state_entries(stage.module, whole)
        )
