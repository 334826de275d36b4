"""What an optimizer holds: its state, and what it makes on the way through one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.optim import SGD, Optimizer

from autoshard.errors import PlanError

_NUMBER = 4  # bytes


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes that an optimizer holds for the parameters that it trains.

    Attributes:
        name: as the user gave it, or `""`.
        copies: tensors of the parameter's size and dtype in the state.
        bytes_per_element: further state for every element of a parameter.
        numbers: single float32 numbers that it keeps for every parameter, such as its count of steps.
        factored: state is one row and one column for every matrix, instead of a tensor (Adafactor).
        temporaries: tensors of a parameter's size that are alive together while that parameter is updated.
        left: of these, how many are still there while the next parameter is updated.
        together: temporaries of all parameters at once, where it updates all with one call for each operator
            (`foreach`).
        foreach: whether it does.
    """

    name: str = ""
    copies: int = 0
    bytes_per_element: float = 0.0
    numbers: int = 0
    factored: bool = False
    temporaries: int = 0
    left: int = 0
    together: int = 0
    foreach: bool = False

    def state_bytes(self, shape: Sequence[int], local: Sequence[int], itemsize: int) -> int:
        """Bytes of the state of one parameter on one device.

        Args:
            shape: of the whole parameter.
            local: of the device's part of it.
            itemsize: bytes of one element.
        """
        elements = math.prod(local)
        held = int(elements * self.bytes_per_element) + self.copies * elements * itemsize
        if self.factored:
            # Rows and columns of a DTensor's variance are whole on every device.
            whole = math.prod(shape)
            held += (whole // shape[-1] + whole // shape[-2]) * itemsize if len(shape) > 1 else elements * itemsize
        return held + _NUMBER * self.numbers

    def moved_bytes(self, shape: Sequence[int], local: Sequence[int], itemsize: int, gradient: int) -> int:
        """Bytes that the update of one parameter reads and writes: its gradient is read, it and its state are both.

        So does one fused kernel, `fused=True`; an optimizer that runs operator by operator moves more.

        Args:
            shape, local, itemsize: as for `state_bytes`.
            gradient: bytes of the gradient on the device.
        """
        return 2 * (math.prod(local) * itemsize + self.state_bytes(shape, local, itemsize)) + gradient

    def step_bytes(self, held: Sequence[int]) -> int:
        """Bytes of temporaries while the optimizer steps, given the bytes of every trained parameter on the device."""
        if self.foreach:
            return self.together * sum(held)
        return max((self.temporaries * one + self.left * last for last, one in pairwise((0, *held))), default=0)


_ADAM = OptimizerMemory("adam", copies=2, numbers=1, temporaries=2, left=1, together=1)
_KNOWN = {
    one.name: one
    for one in (
        _ADAM,
        replace(_ADAM, name="adamw"),
        replace(_ADAM, name="nadam", numbers=2),
        replace(_ADAM, name="radam", left=0),
        OptimizerMemory("adamax", copies=2, numbers=1, temporaries=1, together=1),
        OptimizerMemory("adagrad", copies=1, numbers=1, temporaries=1, left=1, together=2),
        OptimizerMemory("rmsprop", copies=1, numbers=1, temporaries=1, left=1, together=1),
        OptimizerMemory("sgd"),
        OptimizerMemory("momentum", copies=1),
        OptimizerMemory("adafactor", factored=True, numbers=1, temporaries=1, together=1),
    )
}


def optimizer_memory(
    optimizer: str | type[Optimizer] | Optimizer | None, bytes_per_element: float | None, foreach: bool
) -> OptimizerMemory:
    """What an optimizer is known to hold.

    Args:
        optimizer: a name such as `"adamw"`, `"momentum"` (SGD with it) or `"adafactor"`, a class of `torch.optim`, or
            one of these made already; AdamW by default.
        bytes_per_element: in place of a name, the state that an optimizer of another kind keeps for every element of a
            trained parameter; its temporaries are taken to be Adam's.
        foreach: whether it updates all parameters with one call for each operator, as torch's do on accelerators.

    Raises:
        PlanError: the optimizer is not known, both are given, or `bytes_per_element` is negative.
    """
    if bytes_per_element is not None:
        if optimizer is not None:
            raise PlanError(
                f"optimizer={optimizer!r} and optimizer_bytes_per_element={bytes_per_element!r} both say what the "
                "optimizer keeps: give one of them."
            )
        if not bytes_per_element >= 0:
            raise PlanError(
                f"optimizer_bytes_per_element={bytes_per_element!r}: it is what the optimizer keeps for every "
                "element of a trained parameter, such as 8 for Adam in float32, 4 for momentum, 0 for plain SGD."
            )
        return replace(_ADAM, name="", copies=0, numbers=0, bytes_per_element=bytes_per_element, foreach=foreach)
    name = _name_of(optimizer)
    if name.lower() not in _KNOWN:
        raise PlanError(
            f"optimizer={optimizer!r} is not known: choose one of {', '.join(_KNOWN)}, or say what it keeps for every "
            "element of a trained parameter with optimizer_bytes_per_element."
        )
    return replace(_KNOWN[name.lower()], foreach=foreach)


def _name_of(optimizer: object) -> str:
    """The name of an optimizer, as in the table of those known, or for an error."""
    if isinstance(optimizer, Optimizer):
        keeps_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        return "momentum" if type(optimizer) is SGD and keeps_momentum else type(optimizer).__name__
    if isinstance(optimizer, type):
        return optimizer.__name__
    return "adamw" if optimizer is None else str(optimizer)
