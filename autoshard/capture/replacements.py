"""What stands for torch's functions in captured graphs: operators of our own, which the room `operators` installs.

A capture knows none of these operators. It asks what is installed, and never runs without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autoshard.capture.capture_device import without_devices
from autoshard.errors import CaptureError

Function = Callable[..., Any]


class LossReplacement(Protocol):
    """Replaces losses of an exported graph whose logits are too large."""

    def __call__(
        self, module: fx.GraphModule, devices: int, room: float | None = None
    ) -> Mapping[torch.dtype, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """What a capture puts in the place of torch's functions, in the order in which it does.

    Attributes:
        functions: by torch's function, what is called in its place while `forward` runs.
        called_code: the same, in code that a graph calls as it is: it is never exported, so that `in_graphs` finds
            nothing there.
        contexts: functions that return a context for the run of `forward`.
        in_graphs: replace nodes of an exported graph, and of each of its regions.
        with_constants: replace nodes of an exported graph, given its constants by placeholder.
        large_losses: replaces losses of large logits.
    """

    functions: Mapping[Function, Function]
    called_code: Mapping[Function, Function]
    contexts: Sequence[Callable[[], AbstractContextManager[None]]]
    in_graphs: Sequence[Callable[[fx.Graph], None]]
    with_constants: Sequence[Callable[[fx.Graph, Mapping[fx.Node, Tensor]], None]]
    large_losses: LossReplacement

    @contextlib.contextmanager
    def running_forward(self) -> Iterator[None]:
        """Context in which `forward` runs."""
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())
            stack.enter_context(Exportable())
            yield


_installed: list[Replacements] = []


def install(replacements: Replacements) -> None:
    """Have all captures from now on use these replacements; there is one set of them in a process."""
    assert not _installed, "autoshard.operators installs its replacements once"
    _installed.append(replacements)


def current_replacements() -> Replacements:
    """Return what is installed.

    Raises:
        RuntimeError: nothing is: a graph without our operators would have other plans, and no error.
    """
    if not _installed:
        raise RuntimeError("autoshard.capture has no operators to put into graphs: import autoshard.operators first.")
    return _installed[0]


class Exportable(TorchFunctionMode):
    """Mode in which torch's functions are those of the installed replacements.

    All tensors are made on the device of the capture.
    """

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise CaptureError(
                "torch.nn.utils.rnn.pack_padded_sequence makes a tensor whose size depends on the numbers in lengths, "
                "and no plan can be made for such a size. Give the recurrent layer the padded batch, and leave out "
                "what lies behind the end of each sequence with a mask (its last state is the output at lengths - 1)."
            )
        func, args, kwargs = without_devices(func, args, kwargs or {})
        return current_replacements().functions.get(func, func)(*args, **kwargs)
