"""Tensors that `forward` leaves in attributes of its modules: outputs of the graph beside those that it returns."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoshard.capture.calls import Attribute

_ASSIGNED = re.compile(r"The tensor attributes? (?P<names>.*?) (?:was|were) assigned during export")
_WEIGHT_LISTS = re.compile(r"_flat_weights\[\d+\]")  # of recurrent modules: the same again when torch.export is done


class AssignedTensors:
    """A forward hook of a root module that returns, beside the output, the tensors that attributes were set to.

    Mixtures of experts leave the loss that balances them so, and networks with a memory their state. torch.export
    takes such assignments back.

    Args:
        root: the module, before its call.

    Attributes:
        found: what the call set.
    """

    def __init__(self, root: nn.Module) -> None:
        self.before = dict(_tensors(root))
        self.found: tuple[Attribute, ...] = ()

    def __call__(self, root: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The output and the assigned tensors; the output alone where there are none."""
        found = {path: value for path, value in _tensors(root) if self.before.get(path) is not value}
        self.found = tuple(Attribute(path, value.requires_grad) for path, value in found.items())
        return (output, tuple(found.values())) if found else output

    @contextlib.contextmanager
    def told(self, model: str) -> Iterator[None]:
        """Context of a call of torch.export, in which its warning of lost assignments names those alone that are lost.

        Args:
            model: what the message calls the module.
        """
        with warnings.catch_warnings(record=True) as raised:
            warnings.filterwarnings("always", "The tensor attribute")
            yield
        names: list[str] = []
        for warning in raised:
            match = _ASSIGNED.search(str(warning.message))
            if match is None:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            else:
                names += match["names"].split(", ")
        kept = {f"self.{one.path}" for one in self.found}
        lost = [name for name in names if name not in kept and not _WEIGHT_LISTS.search(name)]
        if lost:
            warnings.warn(
                f"forward of {model} keeps tensors in containers ({', '.join(lost)}): the parallelised module does "
                "not. Return the tensors, or set attributes to them.",
                stacklevel=3,
            )


def _tensors(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain attributes that are tensors, by path."""
    for path, part in root.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                yield (f"{path}.{name}" if path else name), value
