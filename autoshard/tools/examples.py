"""Models with example calls, from functions of the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autoshard import InputError


def check_factory_result(result: object, name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model, positional arguments and keyword arguments of what a function of the user returned.

    Raises:
        InputError: it is not `(model, args, kwargs)`, `(model, args)` with a tuple, or `(model, kwargs)` with a
            mapping.
    """
    match result:
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return model, tuple(args), dict(kwargs)
        case (nn.Module() as model, Mapping() as kwargs):
            return model, (), dict(kwargs)
        case (nn.Module() as model, tuple() | list() as args):
            return model, tuple(args), {}
    shape = f"a {type(result).__name__}"
    if isinstance(result, tuple):
        shape = f"({', '.join(type(item).__name__ for item in result)})"
    raise InputError(f"{name} returned {shape}: return (model, args, kwargs), with args a tuple and kwargs a mapping.")
