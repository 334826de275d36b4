"""`torch.autograd.Function` in `forward`, kept in the exported graph as a call of the function."""

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

# The place of a tensor in the result of a function.
_TENSOR = object()

# Arguments whose text tells them apart.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


def call_function(
    calls: PythonCalls, function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a function while its caller is exported, and return its result."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    returned: list[Any] = []

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        remaining_tensors, remaining_sizes = iter(tensors), iter(sizes)
        operands = [
            next(remaining_tensors)
            if isinstance(leaf, Tensor)
            else next(remaining_sizes)
            if isinstance(leaf, torch.SymInt)
            else leaf
            for leaf in leaves
        ]
        call_args, call_kwargs = structure.unflatten(operands)
        with scope:
            result = apply_function(_scoped_function(function, scope), call_args, call_kwargs)
        # `calls.add` below runs this body once: the structure of the result is known then.
        returned[:] = [pytree.tree_map_only(Tensor, lambda _: _TENSOR, result)]
        return tensors_of(result)

    call = PythonCall(function.__name__, _text(calls, function, leaves, structure), body)
    results = iter(calls.add(call, tensors_of(leaves), sizes_of(leaves)))
    return pytree.tree_map(lambda leaf: next(results) if leaf is _TENSOR else leaf, returned[0])


def _scoped_function(function: type[Function], scope: TensorScope) -> type[Function]:
    """Return a subclass of the function whose backward runs in a scope."""
    backward = {
        name: staticmethod(_in_scope(getattr(function, name), scope))
        for name in ("backward", "vjp")
        if getattr(function, name) is not getattr(Function, name)
    }
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__}
    kind: Any = type(function)
    scoped: type[Function] = kind(function.__name__, (function,), {**backward, **names})
    return scoped


def _in_scope(backward: Callable[..., Any], scope: TensorScope) -> Callable[..., Any]:
    @wraps(backward)
    def run(*args: Any) -> Any:
        scope.note(args)
        with scope:
            return backward(*args)

    return run


def _text(calls: PythonCalls, function: type[Function], leaves: list[Any], structure: Any) -> str:
    """Return the text of a call: two calls with equal texts do the same."""
    name = f"{function.__module__}.{function.__qualname__}"
    plain = all(isinstance(leaf, (Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves)
    texts = [repr(leaf) if isinstance(leaf, _PLAIN) else "_" for leaf in leaves]
    # Other objects, and functions with closures, may differ though their texts are equal: every call has a number.
    number = "" if plain and "<locals>" not in name else f"#{len(calls.calls)}"
    return f"{name}{number}({', '.join(texts)}) {structure}"
