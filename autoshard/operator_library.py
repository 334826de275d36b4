"""The `autoshard` namespace of operators: how one is defined, for every device, and what is known of those in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("autoshard", "FRAGMENT")

Workspace = Callable[..., int]

WORKSPACES: dict[Any, Workspace] = {}
"""By operator: the bytes that a call holds besides operands and results, from its arguments; tensors need no numbers.

Operators that are not here hold few.
"""

SEEDS: set[Any] = set()
"""Operators that draw the seed of the random numbers of others."""

KERNELS: set[Any] = set()
"""Operators that run a kernel of their own, which a compiler fuses with nothing."""


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
        results_like: makes results of the same shapes and dtypes from arguments without numbers.
        tags: properties that passes over graphs ask for.
        workspace: returns the bytes that the program holds besides operands and results, from the same arguments; left
            out where they are few.
    """
    name = _library.define(schema, tags=tags)
    # One program for all devices, which autograd does not look into: the backward is an operator, too.
    _library.impl(name, program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", results_like, lib=_library)
    op = getattr(torch.ops.autoshard, name).default
    if workspace is not None:
        WORKSPACES[op] = workspace
    return op


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's own kernels add up numbers of `dtype`."""
    # A sum in bfloat16 itself, of 8 bits, would stop growing at 256 ones.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def define_backward(name: str, keep: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Define the backward of an operator by what it keeps of a call (`setup_context`) and by its gradients."""
    torch.library.register_autograd(f"autoshard::{name}", gradients, setup_context=keep, lib=_library)


def define_dispatch(op: Any, mode: type, rule: Callable[..., Any]) -> None:
    """Define how an operator runs under a torch dispatch mode: `rule(mode, op, types, args, kwargs)`."""
    torch.library.register_torch_dispatch(op.name(), mode, rule, lib=_library)


def define_for_autograd(schema: str, program: Callable[..., Any]) -> None:
    """Define an operator whose program runs under autograd, so that its results have the history of what it calls."""
    _library.impl(_library.define(schema), program, "Autograd")
