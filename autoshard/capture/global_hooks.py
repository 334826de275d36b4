"""Hooks that torch runs for every module: a parallelised module runs them around the whole, not around its parts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from autoshard.capture._torch import GLOBAL_HOOKS


@contextlib.contextmanager
def without_global_hooks() -> Iterator[None]:
    """Context of a capture in which the tables of global hooks are empty."""
    # They run around the root at every call: in the graph, they would run a second time.
    before = [dict(table) for table in GLOBAL_HOOKS]
    for table in GLOBAL_HOOKS:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(GLOBAL_HOOKS, before, strict=True):
            table.update(hooks)


def warn_of_global_hooks() -> bool:
    """Warn if there are global hooks, and return True then."""
    has_hooks = any(GLOBAL_HOOKS)
    if has_hooks:
        warnings.warn(
            "there are hooks for all modules (torch.nn.modules.module.register_module_forward_hook and the like): of a "
            "parallelised module they run around the whole, and not around its parts, which are one program. Set hooks "
            "on the parts instead: part.register_forward_hook(...).",
            stacklevel=4,
        )
    return has_hooks
