"""Optimizers that were made before the parameters were placed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.errors import PlanError


def hand_over(replaced: Mapping[Tensor, Tensor]) -> None:
    """Let every optimizer that holds a replaced parameter take the new one at its next step.

    Where old parameters are left, somebody holds them: torch runs a hook before every step of every optimizer then. It
    holds old parameters weakly, and has nothing to do once they are gone.

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
            group["params"][:] = [_new(optimizer, parameter, waiting) for parameter in group["params"]]

    register_optimizer_step_pre_hook(before_step)


def _new(optimizer: Optimizer, parameter: Tensor, waiting: WeakTensorKeyDictionary) -> Tensor:
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
