"""Progress of a capture or a search: a line on a terminal or in a notebook, or records in the log."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger("autoshard")

SECONDS = 10.0  # between two log records


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a capture or a search.

    Attributes:
        phase: the current phase.
        cost: seconds of the best known plan of the current problem; `inf` without one, and in a capture.
        lower_bound: a lower bound of the cost of every plan of that problem; `-inf` without one, and in a capture.
        seconds: seconds since the start.
    """

    phase: str
    cost: float
    lower_bound: float
    seconds: float


@contextlib.contextmanager
def show_progress(verbose: bool, title: str = "planning") -> Iterator[Callable[[Progress], None]]:
    """Context that shows the reports given to the function that it returns.

    Args:
        verbose: log every report at INFO level. Otherwise, on a terminal, or in a notebook with ipywidgets, one line
            shows phase, cost and bound, and disappears when the block ends; elsewhere the last report is logged every
            ten seconds.
        title: text that is shown until the first report.
    """
    # Processes without a console have no stderr.
    console = None if verbose or sys.stderr is None else Console(file=sys.stderr)
    if console is not None and (sys.stderr.isatty() or _draws_widgets(console)):
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title)
            yield lambda progress: bar.update(task, description=progress_text(progress))
        return
    # The last report, if there was one, and the time of the first of its phase.
    last: list[tuple[Progress, float]] = []

    def report(progress: Progress) -> None:
        began = last[0][1] if last and last[0][0].phase == progress.phase else time.monotonic()
        last[:] = [(progress, began)]
        if verbose:
            _log_info(progress_text(progress))

    def report_elapsed(seconds: float) -> None:
        phase = [f"{time.monotonic() - began:.0f} s of them in {_state_text(progress)}" for progress, began in last]
        _log_info(", ".join([f"{title} for {seconds:.0f} s", *phase]))

    with _call_every(SECONDS, report_elapsed):
        yield report


def _draws_widgets(console: Console) -> bool:
    """Return True in a notebook that can show a changing line."""
    # Without ipywidgets rich would show nothing there, and warn.
    return console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None


@contextlib.contextmanager
def _call_every(seconds: float, function: Callable[[float], None]) -> Iterator[None]:
    """Context in which a thread calls a function of the elapsed seconds again and again."""
    start, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            function(time.monotonic() - start)

    # A thread, since a search may be in compiled code for long; a daemon, to not keep the process alive.
    thread = threading.Thread(target=run, name="autoshard progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _log_info(text: str) -> None:
    if log.hasHandlers():
        log.info("%s", text)
    else:
        # Without any handler Python drops INFO records; like warnings, ours then go to stderr.
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, "autoshard: %s", (text,), None)
        logging.StreamHandler().handle(record)


def progress_text(progress: Progress) -> str:
    """Return a report as one line, such as `messages: 0.1885 s per step, at least 0.1884 (gap 0.05 %), after 3.1 s`."""
    state = _state_text(progress)
    return f"{state}{', ' if state != progress.phase else ': '}after {progress.seconds:.1f} s"


def _state_text(progress: Progress) -> str:
    """Return phase, cost and bound as text, as far as known."""
    cost, bound, parts = progress.cost, progress.lower_bound, []
    if math.isfinite(cost):
        parts.append(f"{cost:.4g} s per step")
    if math.isfinite(bound):
        parts.append(f"at least {bound:.4g}")
    if math.isfinite(cost) and math.isfinite(bound) and cost:
        parts[-1] += f" (gap {max(0.0, 1 - bound / cost):.2%})"
    return f"{progress.phase}: {', '.join(parts)}" if parts else progress.phase
