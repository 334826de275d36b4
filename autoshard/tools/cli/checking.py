"""The verbs `doctor`, which examines a model, and `selfcheck`, which examines a machine."""

from __future__ import annotations

import argparse

import autoshard
from autoshard.tools.cli.arguments import Verbs, add_verb, console, usage_errors
from autoshard.tools.cli.targets import TARGETS, add_target, load_target
from autoshard.tools.selfcheck.__main__ import add_arguments, run_command


def add_selfcheck(verbs: Verbs) -> None:
    """Add the verb `selfcheck`."""
    parser = add_verb(
        verbs,
        "selfcheck",
        run_command,
        details="Compare the numbers of small models on all devices with those of one device, and profile a step.\n"
        "Exit status 1: a line is wrong.",
        example="torchrun --nproc-per-node 2 -m autoshard selfcheck --json found.json",
    )
    add_arguments(parser)


def add_doctor(verbs: Verbs) -> None:
    """Add the verb `doctor`."""
    examine = add_verb(
        verbs,
        "doctor",
        _doctor,
        details=f"Report what stops the capture of a model, and which operators would be replicated.\n\n{TARGETS}\n\n"
        "Exit status 1: the model cannot be captured. 2: an argument is not valid.",
        example="autoshard doctor mypackage.models:make",
    )
    add_target(examine)
    examine.add_argument(
        "--cluster", default="h100", help="cluster whose prices predict the seconds: a preset or a file; default: h100"
    )


def _doctor(options: argparse.Namespace) -> int:
    """Print the report on a model; status 1 where it cannot be captured."""
    with usage_errors():
        cluster = autoshard.Cluster.of(options.cluster)
    report = autoshard.doctor(*load_target(options), cluster=cluster)
    console().print(report)
    return 0 if report.captured else 1
