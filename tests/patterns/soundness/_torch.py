"""The private torch names that these tests use, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.definitions import _masked, linalg, special
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "functionalization",
    "is_composite",
    "larger_samples",
    "op_db",
    "to_functional",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

op_db: list[Any] = common_methods_invocations.op_db
to_functional = torch._to_functional_tensor


def is_composite(op: OpOverload) -> bool:
    """Whether the operator is traced as the operators that it is made of."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    """Context in which calls on `to_functional` tensors reach dispatch modes without mutations, as in captures."""
    torch._enable_functionalization(reapply_views=True)
    try:
        with enable_python_dispatcher():
            yield
    finally:
        torch._disable_functionalization()


@contextlib.contextmanager
def larger_samples() -> Iterator[None]:
    """Context in which the sizes that samples are made of (5, 10, 20, 3) are such that 2, 3 and 4 divide some."""
    sizes = {"S": 6, "M": 12, "L": 24, "XS": 4}
    modules = (common_methods_invocations, core, _masked, linalg, special)
    before = [(module, name, getattr(module, name)) for module in modules for name in sizes if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, sizes[name])
    try:
        yield
    finally:
        for module, name, size in before:
            setattr(module, name, size)
