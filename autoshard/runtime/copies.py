"""Copies and pickles of a parallelised module: the `forward` and the shards of a copy, and the error of pickling."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.runtime import _torch
from autoshard.runtime.shards import local_of


def bound_forward(module: nn.Module, runtime_name: str) -> MethodType:
    """Return a `forward` that runs the runtime in an attribute of the module, with the signature of the current one.

    It is a bound method: `copy.deepcopy` does not copy functions, but binds methods to the copy.
    """
    before: Callable[..., Any] = module.forward
    method = before if isinstance(before, MethodType) and before.__self__ is module else None

    @functools.wraps(before if method is None else method.__func__)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runtime = module.__dict__[runtime_name]
        if torch.compiler.is_dynamo_compiling():
            return runtime.call_compiled(*args, **kwargs)
        return runtime(*args, **kwargs)

    # The module is the first argument of the wrapped function.
    if method is None:
        with contextlib.suppress(TypeError, ValueError):
            signature = inspect.signature(before)
            first = inspect.Parameter("module", inspect.Parameter.POSITIONAL_ONLY)
            forward.__dict__["__signature__"] = signature.replace(parameters=[first, *signature.parameters.values()])
    return MethodType(forward, module)


def share_specs(module: nn.Module, memo: Mapping[int, Any]) -> None:
    """Place the parameters that `copy.deepcopy` has copied on the mesh object of the module's.

    Args:
        module: the module.
        memo: the memo of the copy in progress, by `id` of the originals.

    Raises:
        InputError: the copies are not `DTensor`s, as in a capture.
    """
    for name, parameter in module.named_parameters():
        copied = memo.get(id(parameter))
        if copied is None or not isinstance(parameter, DTensor):
            continue
        if not isinstance(copied, DTensor):
            raise InputError(
                f"the shards of {name} were copied as {type(copied).__name__}, not as DTensor: a module with a "
                "parallelised part cannot be captured. Parallelize the outermost module."
            )
        for original, copied_tensor in ((parameter, copied), (parameter.grad, copied.grad)):
            if isinstance(original, DTensor) and isinstance(copied_tensor, DTensor):
                spec = _torch.dtensor_spec_of(original)
                _torch.set_local_tensor(copied_tensor, local_of(copied_tensor), spec)


def pickle_error(subject: str) -> InputError:
    """Return the error about pickling a parallelised module."""
    return InputError(
        f"{subject} cannot be pickled, as torch.save(model) does: its programs and process groups belong to this "
        "process. Save its tensors: torch.save(model.state_dict(), path) with a path per rank, or "
        "torch.distributed.checkpoint.save, keeps the shards of every rank; autoshard.full_state_dict(model) gathers "
        "whole tensors, which the plain module loads."
    )
