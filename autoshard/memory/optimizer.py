"""Memory of an optimizer: its state, and its temporaries during one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.optim import SGD, Optimizer

from autoshard.errors import PlanError

_NUMBER = 4  # bytes of a float32 scalar


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes that an optimizer holds for the parameters that it trains.

    Attributes:
        name: as the user gave it, or `""`.
        copies: number of state tensors of the parameter's size and dtype.
        bytes_per_element: further bytes of state per element of a parameter.
        numbers: number of float32 scalars per parameter, such as its step count.
        factored: True if the state is one row and one column per matrix, instead of a tensor (Adafactor).
        temporaries: tensors of a parameter's size that are alive together while that parameter is updated.
        left: number of these that are still alive while the next parameter is updated.
        together: under `foreach`, number of temporaries of every parameter that are alive at once.
        foreach: True if one call of each operator updates all parameters.
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
        """Return the bytes of the state of one parameter on one device.

        Args:
            shape: global shape of the parameter.
            local: local shape on the device.
            itemsize: bytes of one element.
        """
        elements = math.prod(local)
        held = int(elements * self.bytes_per_element) + self.copies * elements * itemsize
        if self.factored:
            # Rows and columns of a DTensor's variance are replicated on every device.
            whole = math.prod(shape)
            held += (whole // shape[-1] + whole // shape[-2]) * itemsize if len(shape) > 1 else elements * itemsize
        return held + _NUMBER * self.numbers

    def moved_bytes(self, shape: Sequence[int], local: Sequence[int], itemsize: int, gradient: int) -> int:
        """Return the bytes that the update of one parameter reads and writes, given the gradient's bytes.

        One fused kernel (`fused=True`) moves that many; an optimizer that runs operator by operator moves more.
        """
        # The gradient is read; the parameter and its state are read and written.
        return 2 * (math.prod(local) * itemsize + self.state_bytes(shape, local, itemsize)) + gradient

    def step_bytes(self, held: Sequence[int]) -> int:
        """Return the bytes of temporaries during a step, given the bytes of every trained parameter on the device."""
        # One call of each operator has results for all parameters at once.
        if self.foreach:
            return self.together * sum(held)
        updates = pairwise((0, *held))  # a parameter, after the one whose temporaries are still there
        return max((self.temporaries * size + self.left * last for last, size in updates), default=0)


# tests/memory/test_optimizer.py measures these numbers with torch.optim, for single tensors and `foreach`.
_ADAM = OptimizerMemory("adam", copies=2, numbers=1, temporaries=2, left=1, together=1)
_KNOWN = {
    memory.name: memory
    for memory in (
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
    """Return the memory of an optimizer given by name, or by its bytes per element.

    Args:
        optimizer: a name such as `"adamw"`, `"momentum"` (SGD with momentum) or `"adafactor"`, a class of
            `torch.optim`, or an instance of one; AdamW by default.
        bytes_per_element: for any other optimizer, in place of a name, its bytes of state per element of a trained
            parameter. Its temporaries are assumed to be Adam's.
        foreach: True if one call of each operator updates all parameters, torch's default on accelerators.

    Raises:
        PlanError: the optimizer is not known, both are given, or `bytes_per_element` is negative.
    """
    if bytes_per_element is not None:
        if optimizer is not None:
            raise PlanError(
                f"optimizer={optimizer!r} and optimizer_bytes_per_element={bytes_per_element!r} both say what the "
                "optimizer keeps: give one of them."
            )
        if not bytes_per_element >= 0:  # true of NaN too
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
    """Return the name of an optimizer as in `_KNOWN`, or as an error shows it."""
    if isinstance(optimizer, Optimizer):
        # SGD keeps a buffer only with momentum, which each group of parameters may set for itself.
        keeps_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        return "momentum" if type(optimizer) is SGD and keeps_momentum else type(optimizer).__name__
    if isinstance(optimizer, type):
        return optimizer.__name__
    return "adamw" if optimizer is None else str(optimizer)
