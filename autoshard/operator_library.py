"""The `autoshard` namespace of operators: how to define one for every device, and properties of those defined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("autoshard", "FRAGMENT")

Workspace = Callable[..., int]

WORKSPACES: dict[Any, Workspace] = {}
"""Operator -> function that returns a call's bytes besides operands and results, from its (real or fake) arguments.

Operators that are missing hold few bytes.
"""

SEEDS: set[Any] = set()
"""Operators that draw the seed of the random numbers of others."""

KERNELS: set[Any] = set()
"""Operators with a kernel of their own, which a compiler does not fuse."""


def define(
    schema: str,
    program: Callable[..., Any],
    results_like: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    workspace: Workspace | None = None,
) -> Any:
    """Define an operator, and return its overload.

    Args:
        schema: the name, the arguments and the results, as `torch.library.Library.define` takes them.
        program: computes the results on any device, without autograd.
        results_like: returns results of the same shapes and dtypes for fake arguments.
        tags: properties that graph passes read.
        workspace: returns the bytes that the program holds besides operands and results, from the same arguments;
            None where they are few.
    """
    name = _library.define(schema, tags=tags)
    # One program for all devices, opaque to autograd: the backward is an operator, too.
    _library.impl(name, program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", results_like, lib=_library)
    op = getattr(torch.ops.autoshard, name).default
    if workspace is not None:
        WORKSPACES[op] = workspace
    return op


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's own kernels accumulate numbers of `dtype`."""
    # bfloat16 has 8 bits of precision: a sum of ones would stop at 256.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def define_backward(name: str, keep: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Define the backward of an operator by what it saves (`setup_context`) and by its gradients."""
    torch.library.register_autograd(f"autoshard::{name}", gradients, setup_context=keep, lib=_library)


def define_dispatch(op: Any, mode: type, rule: Callable[..., Any]) -> None:
    """Define how an operator runs under a torch dispatch mode: `rule(mode, op, types, args, kwargs)`."""
    torch.library.register_torch_dispatch(op.name(), mode, rule, lib=_library)


def define_for_autograd(schema: str, program: Callable[..., Any]) -> None:
    """Define an operator whose program autograd traces, so that its results have the history of what it calls."""
    _library.impl(_library.define(schema), program, "Autograd")
