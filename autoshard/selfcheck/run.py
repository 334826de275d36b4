"""Running checks on all ranks, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from autoshard.selfcheck.outcome import CheckLine, CheckOutcome
from autoshard.selfcheck.processes import Processes, RankLostError
from autoshard.selfcheck.self_checks import SelfCheck


def run(
    processes: Processes, checks: Sequence[SelfCheck], progress: Callable[[str], None] = lambda name: None
) -> list[CheckLine]:
    """Run checks on all ranks; what one finds, or that it fails, never stops the others.

    Args:
        processes: of the job.
        checks: in order.
        progress: is told the name of each before it runs.

    Returns:
        A line for each, the same on all ranks. Once a rank is lost the rest is skipped.
    """
    lines: list[CheckLine] = []
    processes.start()
    for number, check in enumerate(checks):
        progress(check.name)
        start = time.perf_counter()
        try:
            outcome = processes.agree(check.run)
            lines.append(CheckLine(check.name, outcome, time.perf_counter() - start))
        except RankLostError as error:
            lines.append(CheckLine(check.name, CheckOutcome("wrong", str(error), failure=1)))
            lines += [CheckLine(rest.name, CheckOutcome("skipped", "a rank is lost")) for rest in checks[number + 1 :]]
            break
    if processes.size == 1:
        lines.append(CheckLine("several processes", _ALONE))
    return lines


_ALONE = CheckOutcome(
    "skipped",
    "one process runs no collective: more were not checked",
    "Start one for every device: torchrun --nproc-per-node N -m autoshard.selfcheck",
)


def describe_machine(processes: Processes) -> str:
    """What the checks run on, in words."""
    device = torch.cuda.get_device_name(processes.device) if processes.device.type == "cuda" else "CPU"
    backend = "NCCL" if processes.device.type == "cuda" else "gloo"
    count = f"{processes.size} processes" if processes.size > 1 else "1 process"
    return f"{count}, {device}, {backend}, torch {torch.__version__}"
