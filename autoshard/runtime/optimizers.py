"""Optimizers of placed parameters: replaced parameters, unsupported optimizers, and checkpoints of their state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import InputError, PlanError, warn_caller
from autoshard.runtime._torch import has_dtensor_rule
from autoshard.runtime.adafactor import Adafactor
from autoshard.runtime.checkpoint import checkpointable
from autoshard.runtime.host_states import HostStates, check_elementwise, is_part


def replace_in_optimizers(replaced: Mapping[Tensor, Tensor]) -> None:
    """Replace old parameters in every optimizer that holds them, at its next step.

    The first backward warns if anything but an optimizer of torch holds an old parameter.

    Args:
        replaced: old parameter -> the new parameter of the module.

    Raises:
        PlanError: in `step`, if the optimizer has state of an old parameter, whose shape is that of the whole
            parameter.
    """
    if not replaced:
        return
    # Old parameters are held weakly. The hook remains, and does nothing once they are gone.
    waiting = WeakTensorKeyDictionary(dict(replaced))

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not len(waiting):
            return
        for group in optimizer.param_groups:
            # In place, since L-BFGS keeps the list.
            group["params"][:] = [_replacement(optimizer, parameter, waiting) for parameter in group["params"]]

    register_optimizer_step_pre_hook(before_step)
    _warn_of_unreplaced(waiting)


def _warn_of_unreplaced(waiting: WeakTensorKeyDictionary) -> None:
    """Warn at the first gradient of a new parameter if something but an optimizer holds an old one."""
    hooks: list[RemovableHandle] = []

    def first_gradient(_: Tensor) -> None:
        for hook in hooks:
            hook.remove()
        if len(waiting):
            # Parameters that only reference cycles hold are not in use.
            gc.collect()
        left = list(waiting.keys())
        if left:
            # By type: `isinstance` reads `__class__`, which may run the code of proxies.
            optimizers = [value for value in gc.get_objects() if issubclass(type(value), Optimizer)]
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            served = {id(parameter) for parameters in groups for parameter in parameters}
            left = [parameter for parameter in left if id(parameter) not in served]
        if left:
            warn_caller(
                f"{len(left)} parameters that the module had before they were placed on the mesh are still referred "
                f"to, one of shape {tuple(left[0].shape)} among them: gradients go to module.parameters() as they are "
                "now. Where an optimizer of your own, a list or a closure holds the old ones, make it after "
                "autoshard.parallelize.",
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


def prepare_optimizers(
    module: nn.Module,
    check_gradients: Callable[[], None],
    prepare: Callable[[Optimizer], object] = checkpointable,
    hosted: Callable[[nn.Module], Collection[str]] = lambda _: (),
) -> None:
    """Prepare optimizers of a module's `DTensor` parameters at their first step.

    From then on, checkpoints of their state are correct (`torch.distributed.checkpoint.state_dict` makes an optimizer
    without state take a step first). `step` of an optimizer that cannot work on shards raises an `InputError` first.

    Args:
        module: the module.
        check_gradients: called before every step, or after one with a closure; raises an `InputError` if gradients are
            not ready.
        prepare: makes checkpoints of an optimizer correct.
        hosted: returns the names of the module's parameters with optimizer state on the host.
    """
    watched = weakref.ref(module)
    # The number of parameters at the last check: an optimizer with new groups is checked again.
    checked_counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    ready: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    hosts: weakref.WeakKeyDictionary[Optimizer, HostStates] = weakref.WeakKeyDictionary()

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_part(optimizer):
            return
        # A closure runs the last backward later.
        has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        if optimizer in ready and not has_closure:
            check_gradients()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        module = watched()
        if checked_counts.get(optimizer) == count or module is None:
            return
        ours = {id(parameter): name for name, parameter in module.named_parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in ours]
        names = frozenset(hosted(module))
        on_host = frozenset(id(parameter) for parameter in held if ours[id(parameter)] in names)
        for parameter in held:
            check = check_elementwise if id(parameter) in on_host else _check_steps
            check(optimizer, ours[id(parameter)], parameter)
        if on_host:
            if optimizer not in hosts:
                # Hooks of all optimizers run before its own, so those of this object still run around this step.
                hosts[optimizer] = HostStates(optimizer)
            hosts[optimizer].hosted = on_host
        if held and optimizer not in ready:
            if not has_closure:
                check_gradients()
            ready.add(optimizer)
            prepare(optimizer)
            optimizer.register_step_post_hook(_count_changes)
            optimizer.register_step_post_hook(lambda *_: check_gradients())
        checked_counts[optimizer] = count

    weakref.finalize(module, register_optimizer_step_pre_hook(before_step).remove)


def _count_changes(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment the version of `DTensor` parameters that `foreach` operators change, which autograd does not see.

    So autograd raises its error for a backward whose forward was before the step, as on one device.
    """
    for group in optimizer.param_groups:
        if group.get("foreach"):
            held = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            increment_version([parameter for parameter in held if parameter.grad is not None])


# Optimizers whose in-place operators need replicated `DTensor`s, and what to use instead.
_WHOLE_ONLY: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "Take autoshard.Adafactor, which has the same arguments",
    Rprop: "Take another optimizer",
}


# The operators of `fused=True`. Not every release of torch has DTensor rules for all of them.
_FUSED: dict[type[Optimizer], Any] = {
    torch.optim.SGD: torch.ops.aten._fused_sgd_.default,
    torch.optim.Adagrad: torch.ops.aten._fused_adagrad_.default,
    torch.optim.AdamW: torch.ops.aten._fused_adamw_.default,
    torch.optim.Adam: torch.ops.aten._fused_adam_.default,
}


def _check_fused(optimizer: Optimizer, name: str) -> None:
    operator = next((operator for kind, operator in _FUSED.items() if isinstance(optimizer, kind)), None)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and operator is not None and not has_dtensor_rule(operator):
        kind = type(optimizer).__name__
        raise InputError(
            f"{kind}(fused=True) can't step on the parameters of a parallelised module, such as {name!r}: this torch "
            f"has no {operator} for DTensors. Take {kind}(foreach=True), which computes the same numbers."
        )


def _check_steps(optimizer: Optimizer, name: str, parameter: Tensor) -> None:
    if isinstance(parameter, DTensor):
        _check_fused(optimizer, name)
    sharded = isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)
    # On GPUs with `capturable`, Rprop uses other operators.
    capturable = all(group.get("capturable") for group in optimizer.param_groups)
    if not sharded or capturable or isinstance(optimizer, Adafactor):
        return
    for kind, remedy in _WHOLE_ONLY.items():
        if isinstance(optimizer, kind):
            raise InputError(
                f"{type(optimizer).__name__} can't step on sharded parameters: torch's has no operators for them as "
                f"DTensors, and {name!r} lies as {parameter.placements}. {remedy}, or keep the parameters whole: "  # type: ignore[attr-defined]
                'autoshard.parallelize(..., hints={"*": Replicate()}).'
            )
