"""`PipelineModule`: the part of a module on one pipeline rank, for training there; and its construction."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.python.state import check_invalidating_effects
from autoshard.errors import InputError, MeshError, PipelineError, PlanError
from autoshard.names import suggestion
from autoshard.options import Pipeline
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.plan.pipeline_devices import check_pipeline_options, forward_fingerprint
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.plan.pipeline_planner import plan_pipeline
from autoshard.pipeline.plan.pipeline_replanner import PipelineReplanner
from autoshard.pipeline.plan.stage_reuse import PipelineCaptures
from autoshard.pipeline.run.optimizer_groups import prepare_checkpoints
from autoshard.pipeline.run.stage_runtime import ADVICE, CallCache, PreparedCall
from autoshard.pipeline.run.stage_state import (
    Holders,
    TiedParameters,
    check_same_placements,
    hold_unread_state,
    register_stage_state,
    relink_entries,
    tie,
)
from autoshard.planner.progress_line import show_progress
from autoshard.runtime.call_order import CallOrder
from autoshard.runtime.calls import describe_call
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.copies import pickle_error
from autoshard.runtime.materialize import Initializer, materialize_stages
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.optimizers import prepare_optimizers
from autoshard.runtime.placed_tensor import refuse_draws
from autoshard.runtime.rank_agreement import check_ranks_agree, check_same_inputs, from_first_rank, on_all_ranks
from autoshard.runtime.safetensors import IncompatibleKeys, Paths, load_module
from autoshard.runtime.shards import local_of
from autoshard.specs.axes import MeshShape

# The same as in `torch.nn.utils.clip_grad_norm_`, so that the numbers are those of one device.
_ROUNDING = 1e-6


@torch.no_grad()
def total_norm(
    gradients: Mapping[int, torch.Tensor],
    parameters: int,
    device_mesh: DeviceMesh,
    norm_type: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the norm of all gradients of a model, whose gradients and shards are on different ranks.

    Args:
        gradients: the gradients that this rank counts, by the index of their parameter in the model.
        parameters: the number of parameters of the model.
        device_mesh: all ranks.
        norm_type: p of the p-norm.
        dtype: the dtype of the norms; the same on every rank.

    Returns:
        The norm, on every rank.

    Raises:
        InputError: `norm_type` is negative.
    """
    if not norm_type >= 0:
        raise InputError(f"norm_type={norm_type}: the norm of sharded gradients needs one that is at least 0.")
    # Every rank has the norms of its own shards; only the first replica counts. One reduction per axis sums them.
    norms = torch.zeros(parameters, dtype=dtype, device=device_mesh.device_type)
    for index, gradient in gradients.items():
        local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
        # Shards of uneven splits may be empty; torch has no infinity norm of these.
        if local.numel() and _is_first_replica(gradient):
            norms[index] = torch.linalg.vector_norm(local, norm_type, dtype=dtype)
    # p-th powers of shards' norms add up; for infinity, the maximum over shards counts, and norm 0 is a count.
    adds_powers = 0 < norm_type < math.inf
    if adds_powers:
        norms = norms**norm_type
    for axis in range(device_mesh.ndim):
        operation = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(norms, operation, group=device_mesh.get_group(axis))
    if adds_powers:
        norms = norms ** (1 / norm_type)
    return torch.linalg.vector_norm(norms, norm_type)


@torch.no_grad()
def clip(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients with this norm down to `max_norm`, in place; a smaller norm is not changed."""
    factor = (max_norm / (norm + _ROUNDING)).clamp(max=1.0)
    for gradient in gradients:
        (local_of(gradient) if isinstance(gradient, DTensor) else gradient).mul_(factor)


def _is_first_replica(tensor: torch.Tensor) -> bool:
    """Return True if this rank is the first of the ranks that hold the same shard."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


class Evaluation(NamedTuple):
    """The result of `PipelineModule.eval_step`.

    Attributes:
        loss: the mean over microbatches of the model's loss, on every rank; None if the model returns no loss.
        outputs: the model's outputs for the whole batch, on the ranks of the last stage; None on others.
    """

    loss: torch.Tensor | None
    outputs: Any


class PipelineModule(nn.Module):
    """The stages of a module on this rank, with steps of the whole pipeline.

    The module has the parameters and buffers of this rank's stages, under the model's names; every optimizer of torch
    can train them. (If a rank may have no parameters, pass `[{"params": list(pipeline.parameters())}]`: torch refuses
    an empty list.) Steps take the whole batch, equal on every rank, and split it into the plan's microbatches. Batch
    statistics, such as those of batch norm, are per microbatch.

    `train()` and `eval()` set the mode of later steps. A step with another batch size, other arguments or another mode
    is captured and planned once, with the same stages and placements.

    `torch.distributed.checkpoint` saves and loads the whole model across ranks, as on any other mesh: with
    `get_state_dict(pipeline, optimizer)`, which all ranks call together, with or without
    `flatten_optimizer_state_dict`.

    Attributes:
        sharding_plan: the plan.
    """

    sharding_plan: PipelinePlan

    def __init__(self, call_cache: CallCache, first: PreparedCall) -> None:
        super().__init__()
        plan = call_cache.plan
        held = call_cache.own_stages(first.stages)
        order = [name for name, _ in call_cache.model.named_parameters(remove_duplicate=False)]
        register_stage_state(self, [stage.module for stage in held], order)
        self.sharding_plan = plan
        self.training = call_cache.model.training
        self._call_cache = call_cache
        self._prepared_calls: dict[Hashable, tuple[PreparedCall, ...]] = {}
        # Kinds of calls whose first batch the ranks have compared; comparing later ones would slow down steps.
        self._compared_signatures: set[Hashable] = set()
        self._order = CallOrder(ADVICE)
        self._order.open(call_cache.device_mesh)
        self._tied_parameters = TiedParameters(self, first.stages, plan.schedule.placement, call_cache.group)
        self._tied_parameters.broadcast_values()
        self._holders = Holders(call_cache.model, self)
        if plan.schedule.ranks > 1:
            refuse_draws(self.parameters())
        install_hooks(self)
        # After `train_step`, all gradients are reduced.
        prepare_optimizers(self, lambda: None, functools.partial(prepare_checkpoints, self, call_cache.group))

    def add_call(self, prepared: PreparedCall, call: BoundCall) -> None:
        """Add a prepared kind of call, with gradients, with an example of it."""
        signature = replace(call, grad=True).signature
        entries = self._call_cache.state_entries(prepared, self)
        # The stages of other ranks are freed, together with their parameters.
        stages = self._call_cache.own_stages(prepared.stages)
        self._prepared_calls[signature] = (replace(prepared, stages=stages, entries=entries),)

    def _prepared_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """Return the prepared kind of a call, with this module's current parameters."""
        cache = self._call_cache
        call = BoundCall.of(cache.model, args, kwargs, torch.is_grad_enabled())
        known = self._prepared_calls.get(call.signature, ())
        prepared = next((each for each in known if each.call_format.state.guards.hold()), None)
        if prepared is not None:
            try:
                self._take_parameters(prepared)
            except PipelineError as error:
                # Other ranks may begin the step, and would wait for this one.
                with contextlib.suppress(InputError):
                    self._order.begin_new(prepared.texts, {"the stages of a rank": str(error)})
                raise
            self._order.begin_known(prepared.texts)
        else:
            changes = dict(known[0].call_format.state.guards.changes()) if known else {}
            self._order.begin_new(describe_call(call), changes)
            cache.compare_calls(call)
            on_all_ranks(cache.device_mesh, self._holders.check)
            check_invalidating_effects([each.call_format.state for each in known])
            self._check_model()
            # With this module's parameters: those of the model are on the meta device by now.
            prepared = cache.prepare(self, call)
            self._prepared_calls[call.signature] = (prepared, *known)
        if call.signature not in self._compared_signatures:
            check_same_inputs(
                cache.device_mesh, {name: tensor for name, tensor in call.tensors.items() if not tensor.is_meta}
            )
            self._compared_signatures.add(call.signature)
        return prepared

    def _take_parameters(self, prepared: PreparedCall) -> None:
        """Put the current parameters into the stages: they may have been loaded or materialized since the last call."""
        self._holders.check()
        relink_entries(prepared.entries)
        self._holders.check_hooks()

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks."""
        return self._call_cache.device_mesh

    def _check_model(self) -> None:
        """Raise `PipelineError` if the model was given new parameters after the pipeline was made."""
        for name, parameter in self._call_cache.model.named_parameters():
            if not parameter.is_meta:
                raise PipelineError(
                    f"{name} was put into {type(self._call_cache.model).__name__} after the pipeline was made of it: "
                    "steps run with the parameters of the pipeline. Change these (pipeline.load_state_dict), or make "
                    "another pipeline of the changed model."
                )

    def train(self, mode: bool = True) -> PipelineModule:
        """Run later steps in training mode, or in evaluation mode."""
        self._call_cache.model.train(mode)
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> NamedTuple:
        """Load this rank's part of a state dict, which may also contain the parts of other ranks.

        Args:
            state_dict, strict, assign: as for `nn.Module`. Tensors may be whole, equal on every rank; parameters on the
                meta device are loaded with `assign=True`.
        """
        # With `strict`, torch would refuse the parts of other ranks.
        elsewhere = self._names_elsewhere
        held = {name: value for name, value in state_dict.items() if name not in elsewhere}
        loaded: NamedTuple = super().load_state_dict(held, strict, assign)
        return loaded

    def load_safetensors(
        self, paths: Paths, strict: bool = True, device: torch.device | str | None = None
    ) -> IncompatibleKeys:
        """Load the stages of this rank from files of the whole model: see `autoshard.load_safetensors`."""
        device = device or self._call_cache.device_mesh.device_type
        return load_module(self, paths, strict=strict, device=device, elsewhere=self._names_elsewhere)

    @property
    def _names_elsewhere(self) -> set[str]:
        """The names in the model's state that only other ranks hold."""
        return self._call_cache.model.state_dict().keys() - self.state_dict().keys()

    def materialize(self, device: torch.device | str | None = None, init: Initializer | None = None) -> None:
        """Allocate and initialise the meta tensors of this rank's stages: see `autoshard.materialize`."""
        cache = self._call_cache
        names = cache.uninitialized_names
        materialize_stages(cache.model, [self], cache.device_mesh, cache.plan.axis, device, init, names)
        cache.uninitialized_names = frozenset()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down if their norm over the whole model exceeds `max_norm`.

        `torch.nn.utils.clip_grad_norm_` would only take the norm over this rank's stages. All ranks call this together,
        between `train_step` and the optimizer's step.

        Args:
            max_norm: the maximum norm of all gradients of all stages as one vector.
            norm_type: p of the p-norm, at least 0; infinity selects the largest magnitude.

        Returns:
            The norm before scaling, on every rank, equal to that on one device. A tied parameter counts once.

        Raises:
            InputError: `norm_type` is negative.
        """
        cache = self._call_cache
        indices: dict[torch.Tensor, int] = {}
        index_of = {
            name: indices.setdefault(parameter, len(indices))
            for name, parameter in cache.model.named_parameters(remove_duplicate=False)
        }
        # The rank with a tied parameter's first stage counts it.
        elsewhere = {self.get_parameter(name) for name in self._tied_parameters.names_of_earlier_stages}
        held = [(name, value, value.grad) for name, value in self.named_parameters() if value.grad is not None]
        counted = {index_of[name]: gradient for name, parameter, gradient in held if parameter not in elsewhere}
        # Norms in one dtype on all ranks, whose parameters may have different dtypes.
        dtype = functools.reduce(torch.promote_types, (parameter.dtype for parameter in indices), torch.float32)
        norm = total_norm(counted, len(indices), cache.device_mesh, norm_type, dtype)
        clip([gradient for *_, gradient in held], norm, max_norm)
        return norm

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of a whole batch, and add the gradients to `.grad`, as `backward()` does.

        Args:
            args, kwargs: a call of the model with a whole batch, divisible by the number of microbatches.

        Returns:
            The loss of the batch, on every rank, detached: the mean over all microbatches. If the loss is a
            cross-entropy, the weight of a microbatch is its number of counted targets, such as tokens that are not
            `ignore_index`. Other losses with unequal weights of samples, such as a loss that balances experts, are the
            mean over microbatches, which differs from the whole batch's value on one device.

        Raises:
            InputError: the batch does not divide.
            PipelineError: the model returns no loss, the call runs other operators than the example, or the step
                failed, for example because another rank died. No step can follow a failed one.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("train_step computes gradients, and torch.no_grad() is active: call eval_step there.")
        with self._explained_errors():
            prepared = self._prepared_call(args, kwargs)
            if prepared.runtime.loss is None:
                raise PipelineError(
                    f"{type(self._call_cache.model).__name__} returns no loss, a floating tensor without dims, so "
                    "there is nothing to train: let forward compute it, and pass the targets to it."
                )
            batch = prepared.call_format.split(args, kwargs)
            # Only this step's gradients are summed over the ranks of a tied parameter: earlier ones are summed already.
            self._tied_parameters.stash_gradients()
            loss = prepared.runtime.train(batch)
            self._tied_parameters.sum_gradients()
        prepared.call_format.state.apply_effects()
        return loss

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Context of a step that, if it fails because other ranks were in another call, raises their error."""
        try:
            yield
        except (RuntimeError, PipelineError) as error:
            self._order.raise_failure(error)
            raise

    def eval_step(self, *args: Any, **kwargs: Any) -> Evaluation:
        """Run forward of a whole batch, without gradients.

        Args:
            args, kwargs: as for `train_step`.

        Returns:
            The loss and the outputs: those of the microbatches concatenated along dim 0 if it counts samples, their
            mean if they are 0-d, else those of the last microbatch.

        Raises:
            InputError, PipelineError: as for `train_step`.
        """
        with torch.no_grad(), self._explained_errors():
            prepared = self._prepared_call(args, kwargs)
            loss, outputs = prepared.runtime.evaluate(prepared.call_format.split(args, kwargs))
            prepared.call_format.state.apply_effects()
        return Evaluation(loss, prepared.call_format.join_outputs(outputs, loss) if outputs else None)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(
            f"this rank holds stages of {type(self._call_cache.model).__name__}, not all of it, so it can't be "
            f"called: train_step(...) runs a whole batch forward and backward, eval_step(...) forward."
        )

    def apply(self, fn: object) -> NoReturn:
        raise PipelineError(
            "the modules of a pipeline hold parameters, and have neither the types nor the methods of the model's: a "
            "function that asks for them, as those that initialise do, would change nothing. Apply it to the model "
            "before autoshard.parallelize, or, on the meta device, pass it to pipeline.materialize(init=...)."
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InputError(
            "a pipeline cannot be deep-copied: its stages and process groups are bound to this object. Copy the module "
            "before parallelize and parallelize the copy with the same plan. For averages of weights, such as an EMA, "
            "keep clones: {name: parameter.detach().clone() for name, parameter in pipeline.named_parameters()}."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise pickle_error("a pipeline")


def build_pipeline_module(
    call: BatchCall, device_mesh: DeviceMesh, plan: PipelinePlan, target: Target
) -> PipelineModule:
    """Split a module into the stages of a plan, and keep this rank's, each sharded over its part of the mesh.

    Afterwards the parameters and buffers of the module itself are on the meta device, so that the parts of other ranks
    are freed here. If an error is raised, nothing was changed.

    Args:
        call: a call of the model with a whole batch, divisible by the plan's number of microbatches. Its parameters may
            be on the meta device.
        device_mesh: the mesh, including the pipeline axis.
        plan: the plan.
        target: the target of the whole model, for calls that the plan does not have.

    Raises:
        PlanError: the plan is for another model or mesh, or places a tied parameter in two ways; or pipelines do not
            support an option.
        CaptureError, InputError: as for `capture_microbatch` and `BatchCall.split`.
        PipelineError: the schedule cannot be run.
    """
    check_pipeline_options(target)
    call_cache = CallCache(call.module, device_mesh, plan, target, call.batch_dims)
    bound = BoundCall.of(call.module, call.args, call.kwargs, torch.is_grad_enabled())
    call_cache.compare_calls(bound)
    Holders(call.module, nn.Module()).check_hooks()
    prepared = call_cache.cut(bound)
    plan.check(MeshShape.of(device_mesh), forward_fingerprint(prepared.call_format.step))
    check_same_placements(prepared.stages, plan.stages)
    hold_unread_state(prepared.stages, call.module)
    call_cache.parallelize(prepared)
    # After parallelizing, which gives each stage its own parameters.
    tie(call_cache.own_stages(prepared.stages))
    pipeline = PipelineModule(call_cache, prepared)
    pipeline.add_call(prepared, bound)
    _replace_with_meta(call.module)
    # Through `__dict__`, because an assigned module would become a submodule of the model.
    call.module.__dict__[RUNTIME] = pipeline
    return pipeline


def _replace_with_meta(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module by meta tensors; tied ones remain tied."""
    replacements: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in replacements:
                    meta = torch.empty_like(parameter, device="meta")
                    replacements[parameter] = nn.Parameter(meta, parameter.requires_grad)
                part._parameters[name] = replacements[parameter]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = replacements.setdefault(buffer, torch.empty_like(buffer, device="meta"))


# The default name of the pipeline axis.
PIPELINE_AXIS = "pp"


def resolve_pipeline(mesh: MeshShape, pipeline: Pipeline) -> Pipeline | None:
    """Return the pipeline options with the name of the axis; None for a mesh without a pipeline.

    Raises:
        MeshError: no mesh axis has the given name.
        PlanError: pipeline options are given, but the mesh has no pipeline axis.
    """
    axis = PIPELINE_AXIS if pipeline.axis is None and PIPELINE_AXIS in mesh.names else pipeline.axis
    if axis is not None:
        if axis not in mesh.names:
            raise MeshError(
                f"pipeline axis {axis!r}: the mesh {mesh} has no such axis. {suggestion(axis, list(mesh.names))}"
            )
        return replace(pipeline, axis=axis)
    for name, value in pipeline.requests.items():
        raise PlanError(
            f"{name}={value!r} is an option of a pipeline, and the mesh {mesh} has none: name the axis along which "
            f"stages lie {PIPELINE_AXIS!r}, or pass pipeline=autoshard.Pipeline(axis=...)."
        )
    return None


def plan_with_options(call: BatchCall, mesh: MeshShape, pipeline: Pipeline, target: Target) -> PipelinePlan:
    """Return the plan of `plan_pipeline` for a resolved pipeline.

    Raises:
        InputError: there is no example call.
        AutoshardError: as for `plan_pipeline`.
    """
    _check_example(call)
    captures = PipelineCaptures(call, target)
    with show_progress(target.options.search.verbose, f"planning of {type(call.module).__name__} as a pipeline"):
        plan = plan_pipeline(captures, mesh, pipeline, target)
    return PipelineReplanner.of(captures, mesh, pipeline, target).remember(plan)


def parallelize_pipeline(
    call: BatchCall, device_mesh: DeviceMesh, pipeline: Pipeline, target: Target, *, plan: object = None
) -> PipelineModule:
    """Return this rank's part of a module, by the given plan or else by the first rank's plan.

    Raises:
        InputError: there is no example call.
        PlanError: `plan` is not a pipeline plan.
        AutoshardError: as for `plan_pipeline` and `build_pipeline_module`; nothing was changed then.
    """
    check_ranks_agree(
        device_mesh,
        {
            "whether an example call is given": "one" if call.args or call.kwargs else "none",
            "the plan that is given": "none" if plan is None else type(plan).__name__,
            "the options of the pipeline": str(pipeline),
        },
        "All ranks call autoshard.parallelize alike.",
    )
    _check_example(call)
    if plan is None:
        mesh = MeshShape.of(device_mesh)
        text = from_first_rank(device_mesh, lambda: plan_with_options(call, mesh, pipeline, target).to_json())
        plan = PipelinePlan.from_json(text)
    if not isinstance(plan, PipelinePlan) or plan.axis != pipeline.axis:
        raise PlanError(
            f"the mesh has the pipeline axis {pipeline.axis!r}, and the plan is "
            f"{f'of the pipeline axis {plan.axis!r}' if isinstance(plan, PipelinePlan) else type(plan).__name__}: make "
            "one for this mesh by autoshard.plan."
        )
    return build_pipeline_module(call, device_mesh, plan, target)


def _check_example(call: BatchCall) -> None:
    if not call.args and not call.kwargs:
        raise InputError(
            "a pipeline is planned before its first step: pass an example call with a whole batch, by example_args or "
            "example_kwargs."
        )
