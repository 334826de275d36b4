"""The command: `torchrun --nproc-per-node N -m autoshard.selfcheck [--json OUT]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from autoshard.selfcheck.processes import Processes
from autoshard.selfcheck.result_table import result_data, result_table, verdict_of
from autoshard.selfcheck.run import describe_machine, run
from autoshard.selfcheck.self_checks import CHECKS
from autoshard.selfcheck.step_profile import StepProfile


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the self-check in this process of the job.

    Returns:
        The exit status: 1 where a line is wrong, 2 where no line has the name asked for, else 0.
    """
    options = _parser().parse_args(arguments)
    checks = [
        check
        for check in (*CHECKS, *StepProfile(options.cluster).checks())
        if options.only is None or any(fnmatchcase(check.name, pattern) for pattern in options.only)
    ]
    if not checks:
        sys.stderr.write(f"autoshard.selfcheck: no check is named {' or '.join(options.only)}\n")
        return 2
    processes = Processes.of_job(options.timeout)
    start = time.perf_counter()
    try:
        lines = run(processes, checks, _say if processes.rank == 0 else lambda name: None)
        seconds = time.perf_counter() - start
        if processes.rank == 0:
            Console(width=None if sys.stdout.isatty() else 120).print(
                result_table(lines, describe_machine(processes), seconds)
            )
            if options.json is not None:
                options.json.write_text(
                    json.dumps(result_data(lines, describe_machine(processes), seconds), indent=1) + "\n", "utf-8"
                )
    finally:
        processes.stop()
    return int(verdict_of(lines) == "wrong")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m autoshard.selfcheck",
        description="Check autoshard on this machine: numbers against one device, and a profile of a step.",
    )
    parser.add_argument("--json", metavar="OUT", type=Path, help="write the lines as data, too")
    parser.add_argument("--only", metavar="CHECK", nargs="+", help="names or patterns of lines, such as 'attention*'")
    parser.add_argument("--cluster", help="preset or file of calibrate that predicts the step")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help="of a collective; 60 by default")
    return parser


def _say(name: str) -> None:
    sys.stderr.write(f"checking {name}\n")


if __name__ == "__main__":
    sys.exit(main())
