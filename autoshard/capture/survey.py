"""A dry run that continues past the lines at which capture stops, and so finds all of them at once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.capture._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    TorchDispatchMode,
    outside_modes,
    pytree,
    survey_mode,
)
from autoshard.capture.capture_errors import fault_reason, is_fault, running_line, user_line
from autoshard.capture.python.fake_module import fake_copy, fake_like
from autoshard.capture.python.reachable import Reachable

aten = torch.ops.aten

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class UncapturableLine:
    """A line at which capture stops.

    Attributes:
        module: path of the module whose forward runs the line, `""` for the root.
        where: the line, such as `model.py:12 (if x.sum() > 0:)`; empty if unknown.
        what: why no graph can hold the line, or the error that ended the dry run.
    """

    module: str
    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The result of a dry run.

    findings: the lines, in execution order, each once.
        calls: by module path, the positional and keyword arguments of the first call, as fake tensors; without modules
            that the dry run did not reach.
            dry run did not reach are absent.
    """

    findings: tuple[UncapturableLine, ...]
    calls: dict[str, CallArguments]


def survey(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Survey:
    """Run a fake twin of the module once, with substitutes wherever the numbers of a tensor are read.

    A condition is true at its first evaluation at a line and false from then on, so that loops end; numbers are 1;
    data-dependent sizes are as large as possible. A line without a substitute ends the run, and is the last of the
    findings. The module itself is not touched.

    Args:
        module: the module; its parameters may be on several devices.
        args: positional arguments, tensors of global shape.
        kwargs: keyword arguments.

    Raises:
        CaptureError: the module cannot be copied, or has parameters without a shape.
    """
    mode, reachable = survey_mode(), Reachable(module)
    with outside_modes(), contextlib.ExitStack() as stack:
        twin = fake_copy(module, mode, reachable, one_device=False)
        # The code is the user's: undo its changes outside the module.
        stack.callback(reachable.restore)
        fake_args, fake_kwargs = pytree.tree_map_only(
            torch.Tensor, lambda leaf: fake_like(leaf, mode), (args, dict(kwargs))
        )
        visits = _ModuleCalls(twin)
        stand_ins = _StandIns(visits)
        try:
            with mode, stand_ins:
                twin(*fake_args, **fake_kwargs)
        except DynamicOutputShapeException:
            pass  # already noted where it was raised
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "no further message")
            reason = fault_reason(error) if is_fault(error) else f"{type(error).__name__}: {text}"
            stand_ins.note(reason, user_line(error.__traceback__).removeprefix(" at "))
    return Survey(tuple(stand_ins.findings.values()), visits.calls)


class _ModuleCalls:
    """Record of the module that is running, and of the first call of every module."""

    def __init__(self, module: nn.Module) -> None:
        self.stack = [""]
        self.calls: dict[str, CallArguments] = {}
        # Not the root, whose arguments the caller has. The user's hooks may raise, so these come before them.
        for path, part in module.named_modules():
            if path:
                part.register_forward_pre_hook(partial(self._enter, path), prepend=True, with_kwargs=True)
                part.register_forward_hook(self._leave)

    def _enter(self, path: str, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stack.append(path)
        self.calls.setdefault(path, (args, kwargs))

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()


class _StandIns(TorchDispatchMode):
    """A mode that substitutes results of operators that need numbers, and notes the lines that called them."""

    def __init__(self, visits: _ModuleCalls) -> None:
        super().__init__()
        self.visits = visits
        self.findings: dict[str, UncapturableLine] = {}
        self.query_counts: Counter[str] = Counter()

    def note(self, what: str, where: str) -> None:
        """Add a finding at the running module, unless its line has one."""
        self.findings.setdefault(where or what, UncapturableLine(self.visits.stack[-1], where, what))

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            where = running_line()
            self.note("data-dependent: a Python number, or the way at a branch, is taken from a tensor", where)
            # Code reads a number by this operator, and the truth of a comparison by others, such as `equal`.
            self.query_counts[where] += 1
            dtype = args[0].dtype if func is aten._local_scalar_dense.default else torch.bool
            first = self.query_counts[where] == 1
            return first if dtype is torch.bool else (1.0 if dtype.is_floating_point else 1)
        except DynamicOutputShapeException:
            self.note(f"data-dependent: the size of what {func} returns is taken from a tensor", running_line())
            # As large as possible, so that later code sees the most demanding shapes.
            stand_in = _LARGEST.get(func)
            if stand_in is None:
                raise
            return stand_in(*args)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, mask.shape)).reshape(-1)


def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Return `x[mask]` as if the mask were true everywhere."""
    whole: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            whole += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in index.shape]
        else:
            whole.append(index)
    return aten.index.Tensor(x, whole)


def _unique(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # As if all numbers were different.
    flat = x.reshape(-1)
    return flat, x.new_empty(x.shape, dtype=torch.int64), flat.new_empty(flat.shape, dtype=torch.int64)


# Largest possible results of operators whose size depends on numbers.
_LARGEST: dict[Any, Any] = {
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
}
