"""Optimizers of placed parameters: those made before, those that can't step, and the state that all save."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import InputError, PlanError
from autoshard.runtime.checkpoint import checkpointable


def replace_in_optimizers(replaced: Mapping[Tensor, Tensor]) -> None:
    """Let every optimizer that holds a replaced parameter take the new one at its next step.

    Where old parameters are left, somebody holds them: torch runs a hook before every step of every optimizer then. It
    holds old parameters weakly, and has nothing to do once they are gone. The first backward warns of those that no
    optimizer of torch's holds: what else holds them trains nothing.

    Args:
        replaced: old parameter -> the one that stands in its place in the module.

    Raises:
        PlanError: in `step`, if the optimizer has state for an old parameter: it has the shape of the whole.
    """
    if not replaced:
        return
    waiting = WeakTensorKeyDictionary(dict(replaced))

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not len(waiting):
            return
        for group in optimizer.param_groups:
            # In place: L-BFGS keeps the list.
            group["params"][:] = [_replacement(optimizer, parameter, waiting) for parameter in group["params"]]

    register_optimizer_step_pre_hook(before_step)
    _warn_of_unreplaced(waiting)


def _warn_of_unreplaced(waiting: WeakTensorKeyDictionary) -> None:
    hooks: list[RemovableHandle] = []

    def first_gradient(_: Tensor) -> None:
        for hook in hooks:
            hook.remove()
        if len(waiting):
            gc.collect()  # what is in cycles is held by nobody
        left = list(waiting.keys())
        if left:
            optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
            served = {
                id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]
            }
            left = [parameter for parameter in left if id(parameter) not in served]
        if left:
            warnings.warn(
                f"{len(left)} parameters that the module had before they were placed on the mesh are still referred "
                f"to, one of shape {tuple(left[0].shape)} among them: gradients go to module.parameters() as they are "
                "now. Where an optimizer of your own, a list or a closure holds the old ones, make it after "
                "autoshard.parallelize.",
                stacklevel=2,
            )

    hooks += [new.register_post_accumulate_grad_hook(first_gradient) for new in waiting.values() if new.requires_grad]


def _replacement(optimizer: Optimizer, parameter: Tensor, waiting: WeakTensorKeyDictionary) -> Tensor:
    new = waiting.get(parameter)
    if new is None:
        return parameter
    if optimizer.state.get(parameter):
        raise PlanError(
            f"this {type(optimizer).__name__} holds state for a parameter of shape {tuple(parameter.shape)} that was "
            "placed on a mesh since, and shards have no use for it. Make the optimizer after autoshard.parallelize (or "
            "the compiled model's first call), and load the state into it."
        )
    optimizer.state.pop(parameter, None)
    return new


def prepare_optimizers(module: nn.Module) -> None:
    """Make optimizers of a module's parameters ready at their first step.

    Their state is saved and loaded rightly from then on (`torch.distributed.checkpoint.state_dict` has an optimizer
    without state take a step before anything else), and those that can't step on shards are refused.

    Args:
        module: its parameters are `DTensor`s; it is referred to weakly.

    Raises:
        InputError: in `step`, before anything is changed.
    """
    watched = weakref.ref(module)
    known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # parameters that it had
    ready: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        module = watched()
        if known.get(optimizer) == count or module is None:
            return
        ours = {id(parameter): name for name, parameter in module.named_parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in ours]
        for parameter in held:
            _check_steps(optimizer, ours[id(parameter)], parameter)
        if held and optimizer not in ready:
            ready.add(optimizer)
            checkpointable(optimizer)
            optimizer.register_step_post_hook(_count_changes)

    weakref.finalize(module, register_optimizer_step_pre_hook(before_step).remove)


def _count_changes(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let autograd know that `foreach` operators have changed parameters: it does not see that of a `DTensor`.

    So a backward of a forward before the step is refused as on one device.
    """
    for group in optimizer.param_groups:
        if group.get("foreach"):
            increment_version([one for one in group["params"] if isinstance(one, DTensor) and one.grad is not None])


_WHOLE_ONLY = (Adafactor, Rprop)
"""Optimizers whose operators `DTensor` has in place for whole parameters alone."""


def _check_steps(optimizer: Optimizer, name: str, parameter: Tensor) -> None:
    sharded = isinstance(parameter, DTensor) and any(not one.is_replicate() for one in parameter.placements)
    captured = all(group.get("capturable") for group in optimizer.param_groups)  # Rprop's other code, on GPUs
    if sharded and isinstance(optimizer, _WHOLE_ONLY) and not captured:
        raise InputError(
            f"{type(optimizer).__name__} can't step on sharded parameters: torch's has no operators for them as "
            f"DTensors, and {name!r} lies as {parameter.placements}. Take another optimizer, or keep the parameters "  # type: ignore[attr-defined]
            'whole: autoshard.parallelize(..., hints={"*": Replicate()}).'
        )
