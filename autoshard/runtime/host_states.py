"""Optimizers that keep the state of some parameters on the host and update them there (ZeRO-Offload).

The optimizer may be any elementwise one of torch's. In a step, the gradients and numbers of these parameters are copied
to the host together. The optimizer then updates its other parameters on the device, and these one by one on the host as
soon as their copies have arrived. The new numbers are copied back during the next update. On accelerators, copies run
on one stream per direction, in pinned host memory.

In `optimizer.state`, and so in `state_dict()`, the state of such a parameter is, like any other state, `DTensor`s with
the placements of the parameter; their local tensors are on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from autoshard.capture.host_copies import await_copy, copy_aside, host_memory, synchronize
from autoshard.errors import InputError
from autoshard.runtime.shards import local_of, wrap_like

# Optimizers with separate state per parameter; each element of it depends only on that element of the gradient.
_ELEMENTWISE = (SGD, Adam, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD, Rprop)
# Scalars of a parameter's state, which are plain tensors; everything else has the parameter's shape.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
_PART = "_autoshard_part"
_HOST = torch.device("cpu")

Group = dict[str, Any]


def check_elementwise(optimizer: Optimizer, name: str, parameter: Tensor) -> None:
    """Raise an `InputError` unless an optimizer can update shards on the host; the error names a parameter."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, _ELEMENTWISE):
        raise InputError(
            f"{kind} can't keep its state for {name!r} on the host, where the plan has it: a rank updates the elements "
            f"of its shards there, and {kind} is not known to work element by element. Take torch's "
            f"{', '.join(each.__name__ for each in _ELEMENTWISE)} or a class derived from one of them, or plan with "
            'offload_optimizer="none".'
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise InputError(
            f"{kind}(capturable=True) can't keep its state for {name!r} on the host, where the plan has it: CUDA "
            'graphs have no steps of the host. Leave capturable out, or plan with offload_optimizer="none".'
        )


class _Copies(NamedTuple):
    """A pending update of a parameter: its group, and the copies of gradient and parameter on the host."""

    group: Group
    parameter: DTensor
    gradient: Tensor
    value: Tensor


class HostStates:
    """Steps of one optimizer with state on the host, run by its hooks.

    Args:
        optimizer: the optimizer.

    Attributes:
        hosted: identities of the parameters whose state is on the host.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.hosted: frozenset[int] = frozenset()
        self._copied: list[_Copies] = []
        self._loading: dict[Tensor, dict[str, Any]] = {}
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Start the copies to the host, and restrict the step to the other parameters."""
        if is_part(optimizer):
            return None
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise InputError(
                "optimizer.step(closure) computes gradients within the step, and copies of some have to be on the host "
                "before it: call the closure yourself, and then step() without it."
            )
        self._copied, others = [], []
        for group in optimizer.param_groups:
            hosted = [each for each in group["params"] if id(each) in self.hosted]
            self._copied += [_start(group, each) for each in hosted if each.grad is not None]
            others.append({**group, "params": [each for each in group["params"] if id(each) not in self.hosted]})
        return (_part(optimizer, others),), {}

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update on the host, and copy back."""
        if is_part(optimizer):
            return
        copied, self._copied = self._copied, []
        for copies in copied:
            _update(optimizer, copies)
        for copies in copied:
            await_copy(local_of(copies.parameter))

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Remove the state that belongs on the host: torch would load it to the parameter's device."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Torch refuses groups of other lengths.
        hosted = {
            number: parameter
            for number, parameter in zip(saved, parameters, strict=False)
            if id(parameter) in self.hosted and number in state_dict["state"]
        }
        self._loading = {parameter: state_dict["state"][number] for number, parameter in hosted.items()}
        others = {number: state for number, state in state_dict["state"].items() if number not in hosted}
        return {**state_dict, "state": others}

    def _after_load(self, optimizer: Optimizer) -> None:
        for parameter, state in self._loading.items():
            optimizer.state[parameter] = {
                name: value
                if name in _NUMBERS or not isinstance(value, DTensor)
                else wrap_like(local_of(value).to(_HOST, parameter.dtype), value)
                for name, value in state.items()
            }
        self._loading = {}


def is_part(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of some parameters of another one, which shares the other's hooks."""
    return _PART in vars(optimizer)


def _part(optimizer: Optimizer, groups: Sequence[Group]) -> Optimizer:
    """Return an optimizer with these groups that shares everything else, its state included."""
    part = object.__new__(type(optimizer))
    part.__dict__ = {**vars(optimizer), "param_groups": [*groups], _PART: True}
    return part


def _start(group: Group, parameter: Tensor) -> _Copies:
    assert isinstance(parameter, DTensor)
    assert parameter.grad is not None
    copies = []
    for tensor in (parameter.grad, parameter):
        local = local_of(tensor)
        copies.append(copy_aside(host_memory(local), local, local.device, "to host"))
    return _Copies(group, parameter, *copies)


def _update(optimizer: Optimizer, copies: _Copies) -> None:
    """Update one parameter on the host, and start to copy it back."""
    group, parameter, gradient, value = copies
    for copy in (gradient, value):
        synchronize(copy)
    value.grad = gradient
    state = optimizer.state.pop(parameter, None)
    if state is not None:
        # State that was loaded or made before the first step is on the device.
        optimizer.state[value] = {
            name: local_of(each).to(_HOST) if isinstance(each, Tensor) else each for name, each in state.items()
        }
    _step_of(type(optimizer))(_part(optimizer, [{**group, "params": [value]}]))
    local = local_of(parameter)
    copy_aside(local, value, local.device, "from host")
    increment_version(parameter)  # autograd does not see the copy
    if value in optimizer.state:
        optimizer.state[parameter] = {
            name: wrap_like(each, parameter) if isinstance(each, Tensor) and name not in _NUMBERS else each
            for name, each in optimizer.state.pop(value).items()
        }


def _step_of(kind: type[Optimizer]) -> Any:
    """Return the `step` of an optimizer class without the hooks that torch adds to each class."""
    return kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step  # type: ignore[attr-defined]
