"""What takes long, as somebody sees it who waits: a line at a terminal, or now and then one in the log."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from autoshard.planner.search_progress import Progress

_log = logging.getLogger("autoshard")

SECONDS = 10.0
"""Between lines in the log of what takes long."""


@contextlib.contextmanager
def show_progress(verbose: bool, doing: str = "planning") -> Iterator[Callable[[Progress], None]]:
    """What a planner reports to while the block runs.

    Args:
        verbose: log every report at INFO level. Else, where a terminal is at standard error, one line there tells
            phase, cost and bound, and goes when the block ends; elsewhere the last report is logged every ten seconds.
        doing: what the block does, for those who see it before there is a report.
    """
    if not verbose and sys.stderr is not None and sys.stderr.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(doing)
            yield lambda one: bar.update(task, description=progress_text(one))
        return
    last: list[Progress] = []

    def report(one: Progress) -> None:
        last[:] = [one]
        if verbose:
            _say(progress_text(one))

    def report_elapsed(seconds: float) -> None:
        _say("; ".join([f"{doing} for {seconds:.0f} s", *map(progress_text, last)]))

    with _call_every(SECONDS, report_elapsed):
        yield report


@contextlib.contextmanager
def _call_every(seconds: float, say: Callable[[float], None]) -> Iterator[None]:
    """Call a function of the seconds gone by, every so many of them, while the block runs."""
    start, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            say(time.monotonic() - start)

    thread = threading.Thread(target=run, name="autoshard progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _say(text: str) -> None:
    """A record at INFO level; on standard error where nobody has set up logging, as Python does with warnings."""
    if _log.hasHandlers():
        _log.info("%s", text)
    else:
        record = _log.makeRecord(_log.name, logging.INFO, __file__, 0, "autoshard: %s", (text,), None)
        logging.StreamHandler().handle(record)


def progress_text(one: Progress) -> str:
    """A report as one line, such as `messages: 0.1885 s per step, at least 0.1884 (gap 0.05 %), after 3.1 s`."""
    parts = []
    if math.isfinite(one.cost):
        parts.append(f"{one.cost:.4g} s per step")
    if math.isfinite(one.lower_bound):
        parts.append(f"at least {one.lower_bound:.4g}")
    if math.isfinite(one.cost) and math.isfinite(one.lower_bound) and one.cost:
        parts[-1] += f" (gap {max(0.0, 1 - one.lower_bound / one.cost):.2%})"
    return f"{one.phase}: {', '.join([*parts, f'after {one.seconds:.1f} s'])}"
