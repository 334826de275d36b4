"""The command: `torchrun --nproc-per-node N -m autoshard selfcheck [--json OUT]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from rich.console import Console

from autoshard import AutoshardError, Cluster
from autoshard.tools.selfcheck.outcome import (
    CheckLine,
    CheckOutcome,
    Processes,
    RankLostError,
    result_data,
    result_table,
    verdict_of,
)
from autoshard.tools.selfcheck.self_checks import CHECKS, SelfCheck
from autoshard.tools.selfcheck.step_profile import StepProfile

_ALONE = CheckOutcome(
    "skipped",
    "one process runs no collective: more were not checked",
    "Start one for every device: torchrun --nproc-per-node N -m autoshard selfcheck",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-check in this process of the job.

    Returns:
        The exit status: 1 where a line is wrong, 2 where an option is not valid, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m autoshard selfcheck",
        description="Check autoshard on this machine: compare its numbers with one device's, and profile a step.",
    )
    add_arguments(parser)
    return run_command(parser.parse_args(arguments))


def run_command(options: argparse.Namespace) -> int:
    """Run the self-check with the options of `add_arguments`; return the exit status of `main`."""
    # Before the checks, which take minutes.
    refusal = _refusal(options)
    if refusal:
        sys.stderr.write(f"autoshard selfcheck: {refusal}\n")
        return 2
    checks = [
        check
        for check in (*CHECKS, *StepProfile(options.cluster).checks())
        if options.only is None or any(fnmatchcase(check.name, pattern) for pattern in options.only)
    ]
    if not checks:
        sys.stderr.write(f"autoshard selfcheck: no check is named {' or '.join(options.only)}\n")
        return 2
    processes = Processes.of_job(options.timeout)
    start = time.perf_counter()
    try:
        lines = run(processes, checks, _print_progress if processes.rank == 0 else lambda name: None)
        seconds = time.perf_counter() - start
        if processes.rank == 0:
            machine = _describe_machine(processes)
            # A log has no width of its own: rich would take 80 characters, too few for the table.
            Console(width=None if sys.stdout.isatty() else 120).print(result_table(lines, machine, seconds))
            if options.json is not None:
                text = json.dumps(result_data(lines, machine, seconds), indent=1)
                options.json.write_text(text + "\n", "utf-8")
    finally:
        processes.stop()
    return int(verdict_of(lines) == "wrong")


def _refusal(options: argparse.Namespace) -> str:
    """Return why options are not valid, or an empty text."""
    if options.json is not None and not options.json.parent.is_dir():
        return f"--json {options.json}: there is no folder {options.json.parent}. Make it, or name another file."
    if options.json is not None and options.json.is_dir():
        return f"--json {options.json} is a folder: name a file in it."
    try:
        Cluster.of(options.cluster or "cpu")
    except AutoshardError as error:
        return f"--cluster {options.cluster}: {error}"
    return ""


def run(
    processes: Processes, checks: Sequence[SelfCheck], progress: Callable[[str], None] = lambda name: None
) -> list[CheckLine]:
    """Run checks on all ranks, one after another; the outcome or the failure of one never stops the others.

    Args:
        processes: of the job.
        checks: in order.
        progress: called with the name of each check before it runs.

    Returns:
        A line for each check, the same on all ranks. Once a rank is lost, the rest is skipped.
    """
    lines: list[CheckLine] = []
    processes.start()
    for number, check in enumerate(checks):
        progress(check.name)
        start = time.perf_counter()
        try:
            # Every rank runs every check, whatever the outcomes: a rank that left early would leave the others waiting.
            outcome = processes.agree(check.run)
            lines.append(CheckLine(check.name, outcome, time.perf_counter() - start))
        except RankLostError as error:
            lines.append(CheckLine(check.name, CheckOutcome("wrong", str(error), failure=1)))
            lines += [
                CheckLine(skipped.name, CheckOutcome("skipped", "a rank is lost")) for skipped in checks[number + 1 :]
            ]
            break
    # A single process passes everything: the table has to say that it proves little.
    if processes.size == 1:
        lines.append(CheckLine("several processes", _ALONE))
    return lines


def _describe_machine(processes: Processes) -> str:
    on_cuda = processes.device.type == "cuda"
    device, backend = (torch.cuda.get_device_name(processes.device), "NCCL") if on_cuda else ("CPU", "gloo")
    count = f"{processes.size} processes" if processes.size > 1 else "1 process"
    return f"{count}, {device}, {backend}, torch {torch.__version__}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the self-check to the parser of a command."""
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write the lines to this JSON file")
    parser.add_argument(
        "--only", metavar="CHECK", nargs="+", help="run only lines of these names or patterns, such as 'attention*'"
    )
    parser.add_argument("--cluster", help="cluster that predicts the step: a preset or a file of calibrate")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=60.0, help="timeout of a collective; default: 60"
    )


def _print_progress(name: str) -> None:
    sys.stderr.write(f"checking {name}\n")


if __name__ == "__main__":
    sys.exit(main())
