"""Parameters and buffers of several stages as those of one module, and tied parameters, which several stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import PipelineError, PlanError
from autoshard.pipeline.graph.stage_slices import StageModule, owner_of, register_tensor
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import local_of, set_tensor
from autoshard.specs.spec import Spec


class StateEntry(NamedTuple):
    """A parameter or buffer of a stage.

    Attributes:
        stage, whole: the `_parameters` or `_buffers` of a module in the stage and in the whole.
        key: the tensor's key in both.
        name: the tensor's name in the model.
        dtype: the tensor's dtype.
        text: the description of the tensor in errors.
    """

    stage: dict[str, Any]
    whole: dict[str, Any]
    key: str
    name: str
    dtype: torch.dtype
    text: str


def register_stage_state(whole: nn.Module, stages: Sequence[nn.Module], order: Sequence[str] = ()) -> None:
    """Register the parameters and buffers of stages in `whole`, under the same paths.

    Args:
        whole: a module without any of them.
        stages: modules whose parameters and buffers have the names of the model.
        order: names of parameters in the model's order. The first name of a tied parameter is then, on all ranks, the
            model's first, by which optimizer checkpoints identify it.

    Raises:
        PipelineError: a submodule, parameter or buffer of the model has the name of an attribute of `whole`.
    """
    places = {name: place for place, name in enumerate(order)}
    parameters = [item for stage in stages for item in stage.named_parameters(remove_duplicate=False)]
    for name, parameter in sorted(parameters, key=lambda item: places.get(item[0], len(places))):
        owner, key = _owner(whole, name)
        owner.register_parameter(key, parameter)
    for stage in stages:
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            owner, key = _owner(whole, name)
            owner.register_buffer(key, buffer, key not in _holder(stage, name)._non_persistent_buffers_set)


def hold_unread_state(stages: Sequence[StageModule], model: nn.Module) -> None:
    """Register in the first stage the parameters and buffers of the model that no stage reads.

    They are part of its state, as on one device: of checkpoints, and of what optimizers hold.
    """
    held = {tensor for stage in stages for tensor in (*stage.module.parameters(), *stage.module.buffers())}
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if tensor not in held:
            register_tensor(stages[0].module, name, model)


def state_entries(stage: nn.Module, whole: nn.Module) -> list[StateEntry]:
    """Return the entries for the parameters and buffers of a stage in the whole.

    Raises:
        PipelineError: the whole lacks one of them.
    """
    entries: list[StateEntry] = []
    names = [("_parameters", name) for name, _ in stage.named_parameters(remove_duplicate=False)]
    names += [("_buffers", name) for name, _ in stage.named_buffers(remove_duplicate=False)]
    for kind, name in names:
        key = name.rpartition(".")[2]
        # The whole may lack the submodule, or this tensor in it.
        try:
            table = getattr(_holder(whole, name), kind)
        except AttributeError:
            table = {}
        if key not in table:
            raise PipelineError(
                f"this call reads {name} on a stage whose rank does not hold it: the pipeline was made for "
                f"another one. Make it with an example of such a call."
            )
        tensor = table[key]
        entries.append(
            StateEntry(getattr(_holder(stage, name), kind), table, key, name, tensor.dtype, _text_of(tensor))
        )
    return entries


def relink_entries(entries: Sequence[StateEntry]) -> None:
    """Put the tensors of the whole into the stages: loading and materializing may have replaced them.

    Raises:
        PipelineError: a tensor was deleted, or replaced by one that a stage cannot use; nothing was changed.
    """
    new = []
    for entry in entries:
        tensor = entry.whole.get(entry.key)
        if tensor is None or tensor.dtype != entry.dtype:
            raise _replaced_error(entry.name, tensor, entry.text)
        if tensor is not entry.stage[entry.key]:
            if _text_of(tensor) != entry.text:
                raise _replaced_error(entry.name, tensor, entry.text)
            new.append((entry, tensor))
    for entry, tensor in new:
        entry.stage[entry.key] = tensor


def _replaced_error(name: str, tensor: torch.Tensor | None, text: str) -> PipelineError:
    change = "deleted" if tensor is None else f"made {_text_of(tensor)}, where it was {text},"
    return PipelineError(
        f"{name} was {change} after the pipeline was made, and its stages run with what they were made with. Change "
        "numbers in place, or load them (pipeline.load_state_dict); change the model itself (nn.utils.prune, "
        "parametrize, other dtypes or shapes) before autoshard.parallelize."
    )


def _text_of(tensor: torch.Tensor) -> str:
    placed = f" placed as {Spec(tuple(tensor.placements))}" if isinstance(tensor, DTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}{placed}"


class Holders:
    """The modules that hold the parameters and buffers of a rank's stages, but are never called.

    Args:
        model: the model of the stages, which is not called either.
        whole: the module with the tensors of all of them.
    """

    def __init__(self, model: nn.Module, whole: nn.Module) -> None:
        self._roots = {f"the {type(model).__name__}": model, "the pipeline": whole}
        self._links = [
            (part._modules, key, child, f"{path}.{key}" if path else key)
            for path, part in whole.named_modules()
            for key, child in part._modules.items()
        ]

    def check(self) -> None:
        """Raise a `PipelineError` if one was deleted or replaced."""
        for table, key, child, name in self._links:
            if table.get(key) is not child:
                raise PipelineError(
                    f"{name} of the pipeline was deleted or replaced by another module after the pipeline was made, "
                    "whose stages run with the parameters that they were made with. Load numbers into these "
                    "(pipeline.load_state_dict), or change the model before autoshard.parallelize."
                )

    def check_hooks(self) -> None:
        """Raise a `PipelineError` if one has hooks of calls, which would never run."""
        for _, _, child, name in self._links:
            if child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks:
                raise _hook_error(f"{name} of the pipeline")
        for name, part in self._roots.items():
            if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
                raise _hook_error(name)


def _hook_error(name: str) -> PipelineError:
    return PipelineError(
        f"a hook of calls is set on {name}, and would never run: stages run programs, and nothing calls that module. "
        "Return from forward what the hook looks at (eval_step hands on all outputs), do what it does around "
        "train_step, or use a mesh without a pipeline axis."
    )


def _holder(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule of the whole for a name, created if necessary, and the key in it."""
    first = name.partition(".")[0]
    if hasattr(whole, first) and first not in (*whole._modules, *whole._parameters, *whole._buffers):
        raise PipelineError(
            f"the model has something called {first!r}, and so has {type(whole).__name__}, which stands for it on a "
            f"pipeline: give the model's another name."
        )
    return owner_of(whole, name)


def check_same_placements(stages: Sequence[StageModule], plans: Sequence[ShardingPlan]) -> None:
    """Raise `PlanError` unless all stages that hold a parameter have equal placements of it in their plans."""
    for stage in stages:
        for name, holders in stage.shared.items():
            first, here = (plans[index].placements.get(name) for index in (holders[0], stage.index))
            if first != here:
                raise PlanError(
                    f"parameter {name} is held by stages {', '.join(map(str, holders))} (it is tied); the plan of "
                    f"stage {holders[0]} places it as {first}, that of stage {stage.index} as {here}. They have to "
                    f"place it alike: pin it in the later stage, with a hint."
                )


def tie(stages: Sequence[StageModule]) -> None:
    """Make stages of one rank with the same parameter share one object, that of the first of them."""
    objects: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name in stage.shared:
            current = stage.module.get_parameter(name)
            # That of the first stage, under all names of the parameter in this stage.
            kept = objects.setdefault(name, current)
            for alias, parameter in list(stage.module.named_parameters(remove_duplicate=False)):
                if parameter is current and current is not kept:
                    set_tensor(stage.module, alias, kept)


@dataclass(frozen=True, slots=True)
class _TiedParameter:
    """A parameter shared by ranks: its name, the group of these ranks, and the group rank with the first stage."""

    name: str
    group: dist.ProcessGroup
    first: int


class TiedParameters:
    """The parameters that a rank shares with others along the pipeline axis.

    Args:
        whole: the module with this rank's parameters, by name.
        stages: all stages of the model.
        placement: the rank of every stage.
        group: the process group along the pipeline axis; groups of some of its ranks are created here, once, in the
            same order on all ranks (Rhino 6.3).
    """

    def __init__(
        self, whole: nn.Module, stages: Sequence[StageModule], placement: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._whole = whole
        self._parameters: list[_TiedParameter] = []
        self._stashed_gradients: list[torch.Tensor | None] = []
        holders = {name: held for stage in stages for name, held in stage.shared.items()}
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(dist.get_world_size(group))): group}
        this_rank = dist.get_rank(group)
        # Sorted, because groups must be created in the same order on all ranks.
        for name in sorted(holders):
            ranks = tuple(sorted({placement[stage] for stage in holders[name]}))
            if len(ranks) == 1:
                continue
            if ranks not in groups:
                # Torch names a group after its ranks and the number of groups in the process. All processes need equal
                # numbers of groups, so a process outside this one creates one with itself alone.
                members = ranks if this_rank in ranks else (this_rank,)
                global_ranks = [dist.get_global_rank(group, rank) for rank in members]
                groups[ranks] = dist.new_group(global_ranks, use_local_synchronization=True)
            if this_rank in ranks:
                self._parameters.append(_TiedParameter(name, groups[ranks], ranks.index(placement[holders[name][0]])))

    @property
    def names_of_earlier_stages(self) -> frozenset[str]:
        """Names of the tied parameters whose first stage is on another rank."""
        return frozenset(tied.name for tied in self._parameters if dist.get_rank(tied.group) != tied.first)

    @torch.no_grad()
    def broadcast_values(self) -> None:
        """Broadcast the first stage's values in place, except for parameters on the meta device."""
        for tied in self._parameters:
            local = _local(self._whole.get_parameter(tied.name))
            if not local.is_meta:
                dist.broadcast(local, group=tied.group, group_src=tied.first)

    def stash_gradients(self) -> None:
        """Set the gradients of earlier steps aside before a step, so that only new ones are summed."""
        parameters = [self._whole.get_parameter(tied.name) for tied in self._parameters]
        self._stashed_gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients over all ranks after a step, and add the gradients of earlier steps."""
        for tied, before in zip(self._parameters, self._stashed_gradients, strict=True):
            parameter = self._whole.get_parameter(tied.name)
            if not parameter.requires_grad:
                continue
            # The loss may not depend on it through this rank's stages, but other ranks wait for the sum.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(_local(parameter.grad), group=tied.group)
            if before is not None:
                _local(parameter.grad).add_(_local(before))
        self._stashed_gradients = []


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor
