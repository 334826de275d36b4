"""Tensors that `forward` leaves in Python and in buffers: outputs of the graph beside its results."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from autoshard.capture._torch import without_root_buffers
from autoshard.capture.call_layout import Attribute
from autoshard.capture.capture_errors import running_line
from autoshard.capture.mutations import Mutations
from autoshard.errors import CaptureError

# How torch.export's warning of an assignment that is lost begins.
_ASSIGNMENT_WARNING = "The tensor attribute"


@dataclass(frozen=True, slots=True)
class SetBuffer:
    """A buffer that `forward` set to another tensor.

    Attributes:
        name: of the buffer.
        fault: the reason why the module cannot hold the new tensor; None where it can.
    """

    name: str
    fault: str | None


class AssignedTensors:
    """Hooks of a root module by which a call returns, beside its output, the tensors that it leaves in Python.

    Mixtures of experts keep their balancing loss in an attribute, and recurrent networks their state; running
    statistics are buffers. torch.export undoes assignments to attributes, and follows those to buffers in the root
    module alone.

    Args:
        root: the module, before its call.
        mutations: records which tensors the call leaves in attributes and other objects.
        flags: returns, after the call, flags that are outputs behind everything else.

    Attributes:
        buffers: the buffers that the call set to other tensors, which are returned behind those of `attributes`.
    """

    def __init__(
        self, root: nn.Module, mutations: Mutations, flags: Callable[[], Sequence[torch.Tensor]] = tuple
    ) -> None:
        self.root = root
        self._mutations = mutations
        self._flags = flags
        self.buffers: tuple[SetBuffer, ...] = ()
        self._buffers_before: dict[str, torch.Tensor | None] = {}
        self._lines: dict[tuple[int, str], str] = {}  # the line that set a buffer of a module last

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """The tensors that the call leaves in attributes, containers and variables."""
        return tuple(Attribute(path, value.requires_grad) for path, value in self._mutations.kept)

    def _begin(self, *_: Any) -> None:
        # Not in `__init__`: when the call begins, torch.export has put other buffers in place of the module's.
        self._buffers_before = dict(_buffers(self.root))
        self._mutations.begin()

    def _set(self, module: nn.Module, name: str, buffer: object) -> None:
        self._lines[id(module), name] = running_line()

    def _end(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output, the values of attributes and buffers, and flags; the output alone where there are none."""
        self._mutations.end()
        buffers = dict(self._new_buffers())
        self.buffers = tuple(buffers)
        more = tuple(value for _, value in self._mutations.kept), tuple(buffers.values()), tuple(self._flags())
        return (output, *more) if any(more) else output

    def _new_buffers(self) -> Iterator[tuple[SetBuffer, torch.Tensor]]:
        """Yield the buffers that were set to other tensors, and these tensors.

        Raises:
            CaptureError: no graph can hold the assignment.
        """
        now = dict(_buffers(self.root))
        for name in self._buffers_before | now:
            old, new = self._buffers_before.get(name), now.get(name)
            if new is old:
                continue
            owner, _, last = name.rpartition(".")
            line = self._lines.get((id(self.root.get_submodule(owner)), last), f"forward of {type(self.root).__name__}")
            if new is None:
                raise CaptureError(
                    f"{line} sets the buffer {name} to None or deletes it: a parallelised module keeps its buffers. "
                    f"Fill it with zeros (self.{last}.zero_()), or keep a flag in a plain attribute."
                )
            aliases = [alias for alias, buffer in self._buffers_before.items() if buffer is old and alias != name]
            if old is not None and aliases:
                raise CaptureError(
                    f"{line} sets the buffer {name}, which is registered as {', '.join(aliases)} too: these would be "
                    f"different tensors from then on. Change it in place (self.{last}.copy_(new)), or register two "
                    "tensors."
                )
            if new.requires_grad:
                raise CaptureError(
                    f"{line} sets the buffer {name} to a tensor that requires a gradient, which would reach from every "
                    f"call into those before. Set it to the detached tensor: self.{last} = new.detach()."
                )
            fits = old is not None and old.dtype == new.dtype and _shape(old) == _shape(new)
            fault = (
                f"{line} sets the buffer {name}, which {_describe_tensor(old)}, to a tensor that "
                f"{_describe_tensor(new)}: a parallelised module keeps its buffers, with their "
                "shapes and dtypes. Register it as it will be, keep "
                f"what changes in a plain attribute (self.{last} = ... without register_buffer), or return it."
            )
            # Whether a fault is an error is known only from the graph: a cache of constants may be made anew.
            yield SetBuffer(name, None if fits else fault), new

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of a call of torch.export, whose warnings of lost assignments are dropped: none is lost."""
        with (
            self.root.register_forward_pre_hook(self._begin),
            self.root.register_forward_hook(self._end),
            register_module_buffer_registration_hook(self._set),
            warnings.catch_warnings(record=True) as raised,
            without_root_buffers(),
        ):
            warnings.filterwarnings("always", _ASSIGNMENT_WARNING)
            yield
        for warning in raised:
            if not str(warning.message).startswith(_ASSIGNMENT_WARNING):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _buffers(root: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield all buffers by path, also those that are None."""
    for path, part in root.named_modules():
        for name, value in part._buffers.items():
            yield (f"{path}.{name}" if path else name), value


def _shape(tensor: torch.Tensor) -> tuple[str, ...]:
    # Symbolic sizes as text: comparing the symbols would add a condition on the sizes to the graph.
    return tuple(map(str, tensor.shape))


def _describe_tensor(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "was not there"
    return f"is of shape ({', '.join(_shape(tensor))}) and {tensor.dtype}"
