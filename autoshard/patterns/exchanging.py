"""Operators with collectives inside: programs that all executors run, whether a process holds one rank or all of them.

A local program as a graph grows with every operator that it emits. Where a loop exchanges something at every step, the
loop is one operator instead, defined here by a program on tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.patterns._torch import LocalTensorMode, OpOverload
from autoshard.specs.emitter import collectives


class CollectiveRunner(Protocol):
    """Runs a functional collective and waits for its result."""

    def __call__(self, op: OpOverload, value: Tensor, *args: Any) -> Tensor: ...


_library = torch.library.Library("autoshard", "FRAGMENT")
_programs: dict[OpOverload, Callable[..., Any]] = {}


def define(schema: str, program: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    """Define an operator of the `autoshard` namespace that exchanges inside.

    Args:
        schema: its name, arguments and results, as `torch.library.Library.define` takes them.
        program: what it does on one rank, on the arguments, and the keyword `collective`, by which it exchanges. It
            makes new tensors, and does the same on all ranks.
        shapes: the results on arguments without numbers.

    Returns:
        The operator.
    """

    def on_all_ranks(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One process holds all ranks: not one call for each, which could not meet, but one for all."""
        with LocalTensorMode(mode.ranks):
            return program(*args, **kwargs or {}, collective=_run)

    name = _library.define(schema)
    _library.impl(name, functools.partial(program, collective=_run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", shapes, lib=_library)
    torch.library.register_torch_dispatch(f"autoshard::{name}", LocalTensorMode, on_all_ranks, lib=_library)
    op: OpOverload = getattr(torch.ops.autoshard, name).default
    _programs[op] = program
    return op


def program_of(op: Any) -> Callable[..., Any] | None:
    """The program of an operator that exchanges inside; None for any other."""
    return _programs.get(op)


def _run(op: OpOverload, value: Tensor, *args: Any) -> Tensor:
    return collectives.wait_tensor(op(value, *args))
