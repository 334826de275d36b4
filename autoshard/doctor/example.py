"""A model and an example call, by the name of the function that returns them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from autoshard.errors import InputError

Example = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]


def load_example(text: str) -> Example:
    """Call a factory such as `"package.module:factory"`, found from the current directory as Python finds modules.

    The factory takes no arguments and returns the model and its example call: `(model, args, kwargs)`, or
    `(model, args)` with a tuple, or `(model, kwargs)` with a mapping.

    Returns:
        The model, positional arguments, keyword arguments.

    Raises:
        InputError: there is no such factory, or it returns something else.
    """
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        raise InputError(f'"{text}" names no factory: write "package.module:factory".')
    # A console script, unlike `python -m`, does not look in the current directory.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"the Python module {name} cannot be imported: {error}. Is it below this directory?"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InputError(f"{name} has no function {attribute}.")
    match result := factory():
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return model, tuple(args), kwargs
        case (nn.Module() as model, Mapping() as kwargs):
            return model, (), kwargs
        case (nn.Module() as model, tuple() | list() as args):
            return model, tuple(args), {}
    shape = f"a {type(result).__name__}"
    if isinstance(result, tuple):
        shape = f"({', '.join(type(item).__name__ for item in result)})"
    raise InputError(f"{text} returned {shape}: return (model, args, kwargs), with args a tuple and kwargs a mapping.")
