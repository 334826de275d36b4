"""A search as somebody at a terminal sees it: a line on standard error, or records in the log."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from autoshard.planner.progress import Progress

_log = logging.getLogger("autoshard")


@contextlib.contextmanager
def watched(verbose: bool) -> Iterator[Callable[[Progress], None] | None]:
    """What a planner reports to while the block runs; None where nobody watches.

    Args:
        verbose: log every report at INFO level; else, where a terminal is at standard error, one line there tells
            phase, cost and bound, and goes when the block ends.
    """
    if verbose:
        yield lambda one: _log.info("%s", described(one))
    elif sys.stderr is not None and sys.stderr.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task("planning")
            yield lambda one: bar.update(task, description=described(one))
    else:
        yield None


def described(one: Progress) -> str:
    """A report as one line, such as `messages: 0.1885 s per step, at least 0.1884 (gap 0.05 %), after 3.1 s`."""
    parts = []
    if math.isfinite(one.cost):
        parts.append(f"{one.cost:.4g} s per step")
    if math.isfinite(one.lower_bound):
        parts.append(f"at least {one.lower_bound:.4g}")
    if math.isfinite(one.cost) and math.isfinite(one.lower_bound) and one.cost:
        parts[-1] += f" (gap {max(0.0, 1 - one.lower_bound / one.cost):.2%})"
    return f"{one.phase}: {', '.join([*parts, f'after {one.seconds:.1f} s'])}"
