"""`PipelineModule`: what is left of a module on one rank of a pipeline, and trains there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.call_layout import call_tensors, signature_of
from autoshard.capture.python_state import check_invalidating_effects
from autoshard.errors import InputError, PipelineError
from autoshard.pipeline.plan.pipeline_devices import check_pipeline_options, forward_fingerprint
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.pipeline.run.call_cache import CallCache, PreparedCall
from autoshard.pipeline.run.clipping import clip, total_norm
from autoshard.pipeline.run.state_entries import register_stage_state, relink_entries
from autoshard.pipeline.run.tied_parameters import TiedParameters, check_same_placements, tie
from autoshard.planner.target import Target
from autoshard.runtime.call_tensors import describe_call
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.materialize import Initializer
from autoshard.runtime.materialize_stages import materialize_stages
from autoshard.runtime.module_runtime import RUNTIME
from autoshard.runtime.rank_agreement import check_ranks_agree, check_same_inputs
from autoshard.runtime.safetensors import IncompatibleKeys, Paths, load_module
from autoshard.specs.axes import MeshShape


class Evaluation(NamedTuple):
    """What `PipelineModule.eval_step` gives.

    Attributes:
        loss: the mean over microbatches of the model's loss, on every rank; None where the model returns none.
        outputs: what the model returns for the whole batch, on the ranks of the last stage; None on others.
    """

    loss: torch.Tensor | None
    outputs: Any


class PipelineModule(nn.Module):
    """A module cut into pipeline stages: what this rank holds of it, and steps of the whole.

    It has the parameters and buffers of the stages of this rank, under the model's names; every optimizer of torch
    trains them. (Where a rank may hold none, give it `[{"params": list(pipeline.parameters())}]`: torch refuses an
    empty list.) Steps are given the whole batch, the same on every rank; it is split into the plan's microbatches, and
    what a model says of its batch, such as batch norm's statistics, it says of each microbatch.

    `train()` and `eval()` choose how the model runs in steps after them. A step with another batch size, other
    arguments or in another mode is captured and planned once, under the stages and the placements made.

    `torch.distributed.checkpoint` saves and loads the whole model across ranks, as it does on any other mesh:
    `get_model_state_dict(pipeline)`, and `get_optimizer_state_dict(pipeline, optimizer, options=StateDictOptions(
    flatten_optimizer_state_dict=True))`, since every rank has the state of its own parameters alone.

    Attributes:
        sharding_plan: the plan.
    """

    sharding_plan: PipelinePlan

    def __init__(self, servings: CallCache, first: PreparedCall) -> None:
        super().__init__()
        held = servings.own_stages(first.stages)
        register_stage_state(self, [stage.module for stage in held], first.call_format.constants)
        self.sharding_plan = servings.plan
        self.training = servings.model.training
        self._call_cache = servings
        self._prepared_calls: dict[Hashable, tuple[PreparedCall, ...]] = {}
        self._compared_signatures: set[Hashable] = set()  # kinds of calls whose first batch the ranks have compared
        self._tied_parameters = TiedParameters(self, first.stages, servings.plan.schedule.placement, servings.group)
        self._tied_parameters.broadcast_values()
        install_hooks(self)

    def add_call(self, serving: PreparedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Serve calls such as this one, with gradients, with this."""
        signature = signature_of(self._call_cache.model, args, kwargs, True)
        found = self._call_cache.state_entries(serving, self)
        # The stages of other ranks are let go, and with them their parameters.
        self._prepared_calls[signature] = (
            replace(serving, stages=self._call_cache.own_stages(serving.stages), entries=found),
        )

    def _prepared_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PreparedCall:
        """What serves a call, with the parameters that are here now."""
        signature = signature_of(self._call_cache.model, args, kwargs, torch.is_grad_enabled())
        known = self._prepared_calls.get(signature, ())
        serving = next((one for one in known if one.call_format.state.guards.hold()), None)
        if serving is None:
            compare_calls(self._call_cache, args, kwargs)
            check_invalidating_effects([one.call_format.state for one in known])
            self._check_model()
            serving = self._call_cache.prepare(self, args, kwargs)
            self._prepared_calls[signature] = (serving, *known)
        if signature not in self._compared_signatures:
            tensors = call_tensors(self._call_cache.model, args, kwargs)
            check_same_inputs(
                self._call_cache.device_mesh, {name: one for name, one in tensors.items() if not one.is_meta}
            )
            self._compared_signatures.add(signature)
        relink_entries(serving.entries)
        return serving

    def _check_model(self) -> None:
        """`PipelineError` if the model was given parameters of its own since the pipeline was made of it."""
        for name, parameter in self._call_cache.model.named_parameters():
            if not parameter.is_meta:
                raise PipelineError(
                    f"{name} was put into {type(self._call_cache.model).__name__} after the pipeline was made of it: "
                    "steps run with the parameters of the pipeline. Change these (pipeline.load_state_dict), or make "
                    "another pipeline of the changed model."
                )

    def train(self, mode: bool = True) -> PipelineModule:
        """Run steps as the model does in training, or in evaluation."""
        self._call_cache.model.train(mode)
        super().train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> NamedTuple:
        """Load what is this rank's of a state dict; what other ranks hold of the model may be in it.

        Args:
            state_dict, strict, assign: as for `nn.Module`. Tensors may be whole, the same on every rank; parameters on
                the meta device are filled with `assign=True`.
        """
        elsewhere = self._names_elsewhere
        own = {name: value for name, value in state_dict.items() if name not in elsewhere}
        loaded: NamedTuple = super().load_state_dict(own, strict, assign)
        return loaded

    def load_safetensors(
        self, paths: Paths, strict: bool = True, device: torch.device | str | None = None
    ) -> IncompatibleKeys:
        """Fill what the stages of this rank hold from files of the whole model: see `autoshard.load_safetensors`."""
        device = device or self._call_cache.device_mesh.device_type
        return load_module(self, paths, strict=strict, device=device, elsewhere=self._names_elsewhere)

    @property
    def _names_elsewhere(self) -> set[str]:
        """Names in the model's state of what other ranks hold."""
        return self._call_cache.model.state_dict().keys() - self.state_dict().keys()

    def materialize(self, device: torch.device | str | None = None, init: Initializer | None = None) -> None:
        """Allocate and initialise what the stages of this rank have on the meta device: see `autoshard.materialize`."""
        servings = self._call_cache
        names = servings.uninitialized_names
        materialize_stages(servings.model, [self], servings.device_mesh, servings.plan.axis, device, init, names)
        servings.uninitialized_names = frozenset()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients down, where their norm over the whole model is larger than `max_norm`.

        `torch.nn.utils.clip_grad_norm_` would take the norm of the stages of this rank alone. All ranks call this
        together, between `train_step` and the optimizer's step.

        Args:
            max_norm: of all gradients of all stages as one vector.
            norm_type: p of the p-norm, at least 0; infinity is the largest magnitude.

        Returns:
            The norm before, as one device finds it; every rank has it. A tied parameter counts once.

        Raises:
            InputError: `norm_type` is negative.
        """
        servings = self._call_cache
        places: dict[torch.Tensor, int] = {}
        known = {
            name: places.setdefault(parameter, len(places))
            for name, parameter in servings.model.named_parameters(remove_duplicate=False)
        }
        elsewhere = {self.get_parameter(name) for name in self._tied_parameters.names_of_earlier_stages}
        held = [(name, one, one.grad) for name, one in self.named_parameters() if one.grad is not None]
        counted = {known[name]: gradient for name, one, gradient in held if one not in elsewhere}
        dtype = reduce(torch.promote_types, (one.dtype for one in places), torch.float32)
        norm = total_norm(counted, len(places), servings.device_mesh, norm_type, dtype)
        clip([gradient for *_, gradient in held], norm, max_norm)
        return norm

    def train_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a whole batch; gradients are added to `.grad`, as `backward()` does.

        Args:
            args, kwargs: a call of the model with a whole batch, which the number of microbatches divides.

        Returns:
            The loss of the batch, on every rank, detached: the mean of those of all microbatches. Where that is a
            cross-entropy, every microbatch weighs what counts in it, such as tokens that are not `ignore_index`. What
            else a model adds up over samples that do not count alike, as a loss that balances experts does, is the
            mean over microbatches, and not what one device would compute of the whole batch.

        Raises:
            InputError: the batch does not divide.
            PipelineError: the model returns no loss, or the call runs other operators than the example did; or the step
                broke off, because another rank died, say: no step can follow then.
        """
        if not torch.is_grad_enabled():
            raise PipelineError("train_step computes gradients, and torch.no_grad() is active: call eval_step there.")
        serving = self._prepared_call(args, kwargs)
        if serving.runtime.loss is None:
            raise PipelineError(
                f"{type(self._call_cache.model).__name__} returns no loss, a floating tensor without dims, so there is "
                f"nothing to train: let forward compute it, and pass the targets to it."
            )
        batch = serving.call_format.split(args, kwargs)
        self._tied_parameters.stash_gradients()
        loss = serving.runtime.train(batch)
        self._tied_parameters.sum_gradients()
        serving.call_format.state.apply_effects()
        return loss

    def eval_step(self, *args: Any, **kwargs: Any) -> Evaluation:
        """Forward of a whole batch, without gradients.

        Args:
            args, kwargs: as for `train_step`.

        Returns:
            The loss, and the outputs: those of the microbatches one behind the other along dim 0 where that counts
            samples, their mean where they have no dims, else those of the last microbatch.

        Raises:
            InputError, PipelineError: as for `train_step`.
        """
        with torch.no_grad():
            serving = self._prepared_call(args, kwargs)
            loss, outputs = serving.runtime.evaluate(serving.call_format.split(args, kwargs))
            serving.call_format.state.apply_effects()
        return Evaluation(loss, serving.call_format.join_outputs(outputs, loss) if outputs else None)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(
            f"this rank holds stages of {type(self._call_cache.model).__name__}, not all of it, so it can't be "
            f"called: train_step(...) runs a whole batch forward and backward, eval_step(...) forward."
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InputError(
            "a pipeline cannot be deep-copied: its stages and process groups are bound to this object. Copy the module "
            "before parallelize and parallelize the copy with the same plan."
        )


def build_pipeline_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    plan: PipelinePlan,
    target: Target,
    batch_dims: Mapping[str, int | None] | None = None,
) -> PipelineModule:
    """Cut a module into the stages of a plan, and keep those of this rank, each sharded over its part of the mesh.

    The module itself is left without numbers: its parameters and buffers are on the meta device afterwards, so that
    what other ranks hold is freed here. Nothing is changed where an error is raised.

    Args:
        module: the model; its parameters may be on the meta device.
        device_mesh: the mesh, the pipeline's axis among its axes.
        args, kwargs: a call with a whole batch, which the plan's number of microbatches divides.
        plan: the plan.
        target: of the whole model, for calls that the plan does not know.
        batch_dims: as `microbatches` takes them.

    Raises:
        PlanError: the plan is of another model or mesh, or places a tied parameter in two ways; an option is one that a
            pipeline can not have.
        CaptureError, InputError: as for `exported` and `microbatches`.
        PipelineError: the schedule can't be run.
    """
    check_pipeline_options(target)
    servings = CallCache(module, device_mesh, plan, target, batch_dims)
    compare_calls(servings, args, kwargs)
    serving = servings.cut(args, kwargs)
    plan.check(MeshShape.of(device_mesh), forward_fingerprint(serving.call_format.graph))
    check_same_placements(serving.stages, plan.stages)
    servings.parallelize(serving)
    tie(servings.own_stages(serving.stages))
    pipeline = PipelineModule(servings, serving)
    pipeline.add_call(serving, args, kwargs)
    _replace_with_meta(module)
    module.__dict__[RUNTIME] = pipeline
    return pipeline


def compare_calls(servings: CallCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Have all ranks say the same of a kind of call that is new to them.

    Raises:
        InputError: they do not, on every rank.
    """
    check_ranks_agree(
        servings.device_mesh,
        describe_call(servings.model, args, kwargs, torch.is_grad_enabled()),
        "All ranks call the pipeline alike, each with the whole batch.",
    )


def _replace_with_meta(module: nn.Module) -> None:
    """Put parameters and buffers without numbers in the place of those of a module; what was tied stays tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                part._parameters[name] = made[parameter]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made.setdefault(buffer, torch.empty_like(buffer, device="meta"))
