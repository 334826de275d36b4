"""Definition of operators of the `autoshard` namespace, which run on every device and in every captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("autoshard", "FRAGMENT")


def define(
    schema: str, program: Callable[..., Any], results_like: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Any:
    """Define an operator, and return its overload.

    Args:
        schema: the name, the arguments and the results, as `torch.library.Library.define` takes them.
        program: computes the results on any device, without autograd.
        results_like: makes results of the same shapes and dtypes from arguments without numbers.
        tags: properties that passes over graphs ask for.
    """
    name = _library.define(schema, tags=tags)
    _library.impl(name, program, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", results_like, lib=_library)
    return getattr(torch.ops.autoshard, name).default


def define_backward(name: str, keep: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Define the backward of an operator by what it keeps of a call (`setup_context`) and by its gradients."""
    torch.library.register_autograd(f"autoshard::{name}", gradients, setup_context=keep, lib=_library)


def define_dispatch(op: Any, mode: type, rule: Callable[..., Any]) -> None:
    """Define how an operator runs under a torch dispatch mode: `rule(mode, op, types, args, kwargs)`."""
    torch.library.register_torch_dispatch(op.name(), mode, rule, lib=_library)


def define_for_autograd(schema: str, program: Callable[..., Any]) -> None:
    """Define an operator whose program runs under autograd, so that its results have the history of what it calls."""
    _library.impl(_library.define(schema), program, "Autograd")
