"""The verbs of the command, and its exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from autoshard.cli.arguments import (
    UsageError,
    Verbs,
    add_verb,
    check_output,
    console,
    print_error,
    print_line,
    usage_errors,
)
from autoshard.cli.calibration import add_calibrate
from autoshard.cli.plan_files import explanation, plan_tables, read_plan, read_saved
from autoshard.cli.planning import add_planning_verbs
from autoshard.cli.simulation import add_simulate
from autoshard.cli.targets import TARGETS, add_target, load_target
from autoshard.cli.verification import add_verify
from autoshard.cli.why import add_why
from autoshard.cluster.cluster import Cluster
from autoshard.doctor.doctor import doctor, report_page
from autoshard.errors import AutoshardError
from autoshard.plans.frontier import Frontier
from autoshard.selfcheck.__main__ import add_arguments, run_command
from autoshard.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process.

    Returns:
        The exit status, with the reason on standard error where it is not 0. 2: an argument is not valid, and nothing
        was planned. 1: no plan fits, a model cannot be captured, or a saved plan is not valid. 130: Ctrl-C, before
        there was anything to show.
    """
    options = command_parser().parse_args(arguments)
    try:
        # Verbs that cannot fail by themselves return None.
        return int(options.run(options) or 0)
    except UsageError as error:
        print_error(error)
        return 2
    except (AutoshardError, OSError) as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("autoshard: interrupted\n")
        return 130  # as shells count a process that SIGINT ends


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, with all its verbs."""
    parser = argparse.ArgumentParser(
        prog="autoshard",
        description="Plan the sharding of models, check models, measure clusters, and show saved plans.",
        epilog="autoshard COMMAND --help shows the options of a command and an example.",
    )
    version = f"autoshard {__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_planning_verbs(verbs)
    add_why(verbs)
    add_simulate(verbs)
    _add_saved_plan_verbs(verbs)
    add_verify(verbs)
    _add_doctor(verbs)
    add_calibrate(verbs)
    selfcheck = add_verb(
        verbs,
        "selfcheck",
        run_command,
        summary="check autoshard on a new machine; start with torchrun, one process per device",
        details="Compare the numbers of small models on all devices with those of one device, and profile a step.\n"
        "Exit status 1: a line is wrong.",
        example="torchrun --nproc-per-node 2 -m autoshard selfcheck --json found.json",
    )
    add_arguments(selfcheck)
    return parser


def _add_saved_plan_verbs(verbs: Verbs) -> None:
    show = add_verb(
        verbs,
        "show",
        _show,
        summary="print a saved plan as tables",
        details="Print a saved plan, plan of a pipeline, or frontier as tables.",
        example="autoshard show plan.json",
    )
    explain = add_verb(
        verbs,
        "explain",
        _explain,
        summary="print the strategies and costs of parameters and modules of a saved plan",
        details="Print the placements, strategies and costs of the parameters and modules that a glob matches.",
        example="autoshard explain plan.json 'model.layers.0.mlp'",
    )
    html = add_verb(
        verbs,
        "html",
        _html,
        summary="write a saved plan as a self-contained web page",
        details="Write a saved plan, plan of a pipeline, or frontier as a web page that loads nothing else.\n"
        "Its charts need plotly: pip install 'autoshard[html]'.",
        example="autoshard html plan.json plan.html",
    )
    for verb in (show, explain, html):
        verb.add_argument("plan", metavar="PLAN.json", help="file of the plan")
    explain.add_argument("glob", metavar="GLOB", help="glob of parameter names or module paths, such as 'layers.*.mlp'")
    html.add_argument("output", metavar="OUT.html", type=Path, help="file to write")
    html.add_argument(
        "--memory", metavar="BYTES", help="of a frontier, show the fastest plan within it; default: the turning point"
    )


def _show(options: argparse.Namespace) -> None:
    console().print(*plan_tables(read_saved(options.plan)))


def _explain(options: argparse.Namespace) -> None:
    console().print(explanation(read_plan(options.plan), options.glob))


def _html(options: argparse.Namespace) -> None:
    check_output("OUT.html", options.output)
    saved = read_saved(options.plan)
    if options.memory is None:
        saved.to_html(options.output)
    elif isinstance(saved, Frontier):
        saved.to_html(options.output, chosen=saved.at(memory=options.memory))
    else:
        raise UsageError(f"--memory {options.memory} selects a plan of a frontier, and {options.plan} is one plan.")
    print_line(f"wrote {options.output}")


def _add_doctor(verbs: Verbs) -> None:
    examine = add_verb(
        verbs,
        "doctor",
        _doctor,
        summary="check if a model can be captured and sharded",
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
        cluster = Cluster.of(options.cluster)
    report = doctor(*load_target(options), cluster=cluster)
    console().print(report_page(report))
    return 0 if report.captured else 1
