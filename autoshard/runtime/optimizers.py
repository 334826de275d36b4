"""Optimizers of placed parameters: replacement of old parameters, unsupported optimizers, and checkpoints of state."""

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

    The first backward warns of old parameters that are held by anything but optimizers of torch.

    Args:
        replaced: old parameter -> the one that replaced it in the module.

    Raises:
        PlanError: in `step`, if the optimizer has state for an old parameter, which has the shape of the whole.
    """
    if not replaced:
        return
    # Old parameters are held weakly. The hook stays, and has nothing to do once they are gone.
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
            # Parameters in cycles are in use nowhere.
            gc.collect()
        left = list(waiting.keys())
        if left:
            # By the type: `isinstance` asks objects for their `__class__`, which may run code of proxies.
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

    From then on checkpoints of their state are right (`torch.distributed.checkpoint.state_dict` has an optimizer
    without state take a step first). Those that can't step on shards raise an `InputError` in `step` first.

    Args:
        module: the module.
        check_gradients: called before every step, or after one with a closure; raises an `InputError` if gradients are
            not ready.
        prepare: makes checkpoints of an optimizer right.
        hosted: returns the names of the module's parameters whose optimizer state is on the host.
    """
    watched = weakref.ref(module)
    # The count of parameters at the last look: an optimizer is checked again where groups were added.
    checked_counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    ready: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    hosts: weakref.WeakKeyDictionary[Optimizer, HostStates] = weakref.WeakKeyDictionary()

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_part(optimizer):
            return
        # A closure, which runs the last backward, comes later.
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
                # Its hooks run around this step, too: those of all optimizers come first.
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
    """Count the changes of `DTensor` parameters by `foreach` operators, which autograd does not see.

    So autograd refuses a backward of a forward before the step, as on one device.
    """
    for group in optimizer.param_groups:
        if group.get("foreach"):
            held = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            increment_version([parameter for parameter in held if parameter.grad is not None])


# Optimizers with operators that change a `DTensor` in place only if it is replicated, and what to use instead.
_WHOLE_ONLY: dict[type[Optimizer], str] = {
    torch.optim.Adafactor: "Take autoshard.Adafactor, which has the same arguments",
    Rprop: "Take another optimizer",
}


# The operators of `fused=True`. Not every release of torch has rules for all of them on DTensors.
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
    # With `capturable`, on GPUs, Rprop has other code.
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
