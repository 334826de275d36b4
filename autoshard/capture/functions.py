"""`torch.autograd.Function` in `forward`: the function stands in the exported graph as a call of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autoshard.capture._torch import apply_function, pytree
from autoshard.capture.closures import TensorScope
from autoshard.capture.python_calls import PythonCall, PythonCalls, sizes_of, tensors_of

_TENSOR = object()  # the place of a tensor in what a function returned
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


def call_function(
    calls: PythonCalls, function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a function while its caller is exported; what it returns."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    returned: list[Any] = []

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        given, numbers = iter(tensors), iter(sizes)
        filled = [
            next(given) if isinstance(leaf, Tensor) else next(numbers) if isinstance(leaf, torch.SymInt) else leaf
            for leaf in leaves
        ]
        own_args, own_kwargs = structure.unflatten(filled)
        with scope:
            result = apply_function(_scoped_function(function, scope), own_args, own_kwargs)
        returned[:] = [pytree.tree_map_only(Tensor, lambda _: _TENSOR, result)]
        return tensors_of(result)

    call = PythonCall(function.__name__, _text(calls, function, leaves, structure), body)
    results = iter(calls.add(call, tensors_of(leaves), sizes_of(leaves)))
    return pytree.tree_map(lambda leaf: next(results) if leaf is _TENSOR else leaf, returned[0])


def _scoped_function(function: type[Function], scope: TensorScope) -> type[Function]:
    """The function with a backward that runs in a scope."""
    own = {name: staticmethod(_in_scope(getattr(function, name), scope)) for name in _backward_names(function)}
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__}
    kind: Any = type(function)
    scoped: type[Function] = kind(function.__name__, (function,), {**own, **names})
    return scoped


def _backward_names(function: type[Function]) -> list[str]:
    return [name for name in ("backward", "vjp") if getattr(function, name) is not getattr(Function, name)]


def _in_scope(backward: Callable[..., Any], scope: TensorScope) -> Callable[..., Any]:
    @wraps(backward)
    def run(*args: Any) -> Any:
        scope.note(args)
        with scope:
            return backward(*args)

    return run


def _text(calls: PythonCalls, function: type[Function], leaves: list[Any], structure: Any) -> str:
    """Text of a call: of two calls equal if they do the same; a number where that can't be told from the arguments."""
    name = f"{function.__module__}.{function.__qualname__}"
    plain = all(isinstance(leaf, (Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves)
    told = [repr(leaf) if isinstance(leaf, _PLAIN) else "_" for leaf in leaves]
    number = "" if plain and "<locals>" not in name else f"#{len(calls.calls)}"
    return f"{name}{number}({', '.join(told)}) {structure}"
