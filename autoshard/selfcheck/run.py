"""Running checks on all ranks, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from autoshard.selfcheck.checks import Check
from autoshard.selfcheck.outcome import Line, Outcome
from autoshard.selfcheck.processes import Processes, RankLostError


def run(
    processes: Processes, checks: Sequence[Check], progress: Callable[[str], None] = lambda name: None
) -> list[Line]:
    """Run checks on all ranks; what one finds, or that it fails, never stops the others.

    Args:
        processes: of the job.
        checks: in order.
        progress: is told the name of each before it runs.

    Returns:
        A line for each, the same on all ranks. Once a rank is lost the rest is skipped.
    """
    lines: list[Line] = []
    processes.start()
    for number, check in enumerate(checks):
        progress(check.name)
        start = time.perf_counter()
        try:
            outcome = processes.agree(check.run)
            lines.append(Line(check.name, outcome, time.perf_counter() - start))
        except RankLostError as error:
            lines.append(Line(check.name, Outcome("wrong", str(error), failure=1)))
            lines += [Line(rest.name, Outcome("skipped", "a rank is lost")) for rest in checks[number + 1 :]]
            break
    if processes.size == 1:
        lines.append(Line("several processes", _ALONE))
    return lines


_ALONE = Outcome(
    "skipped",
    "one process runs no collective: more were not checked",
    "Start one for every device: torchrun --nproc-per-node N -m autoshard.selfcheck",
)


def machine(processes: Processes) -> str:
    """What the checks run on, in words."""
    device = torch.cuda.get_device_name(processes.device) if processes.device.type == "cuda" else "CPU"
    backend = "NCCL" if processes.device.type == "cuda" else "gloo"
    count = f"{processes.size} processes" if processes.size > 1 else "1 process"
    return f"{count}, {device}, {backend}, torch {torch.__version__}"
