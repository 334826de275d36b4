"""Replacements of torch's functions in captured graphs by our own operators, which the room `operators` installs.

A capture does not know these operators. It uses what is installed, and never runs without.
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
    """What a capture uses instead of torch's functions, in order of application.

    Attributes:
        functions: by torch's function, what is called instead while `forward` runs.
        called_code: the same for code that a graph calls as a whole: it is not exported, so `in_graphs` has no nodes to
            replace there.
        contexts: functions that return a context for running `forward`.
        in_graphs: functions that replace nodes of an exported graph, and of each of its regions.
        with_constants: functions that replace nodes of an exported graph, given its constants by placeholder.
        large_losses: replaces losses with large logits.
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
    """Use these replacements in all captures from now on; a process has one set of them."""
    assert not _installed, "autoshard.operators installs its replacements once"
    _installed.append(replacements)


def current_replacements() -> Replacements:
    """Return the installed replacements.

    Raises:
        RuntimeError: none are installed: a graph without our operators would get other plans, without an error.
    """
    if not _installed:
        raise RuntimeError("autoshard.capture has no operators to put into graphs: import autoshard.operators first.")
    return _installed[0]


class Exportable(TorchFunctionMode):
    """A mode in which torch's functions are replaced by the installed ones.

    All tensors are created on the device of the capture.
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
