"""The command `autoshard`: examine a model, look at plans that were saved."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from autoshard.doctor import doctor
from autoshard.doctor_report import report_page
from autoshard.errors import AutoshardError
from autoshard.example import load_example
from autoshard.plan import ShardingPlan
from autoshard.report import explanation_table, page, plan_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process.

    Returns:
        The exit status: 0, or 1 with the reason on standard error where a plan or a path is at fault, or where the
        model that was examined cannot be captured.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (AutoshardError, OSError) as error:
        sys.stderr.write(f"autoshard: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard", description="Examine models, and plans saved by ShardingPlan.save."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="print a plan as tables")
    show.set_defaults(run=_show)

    explain = commands.add_parser("explain", help="print why parameters and modules are placed as they are")
    explain.set_defaults(run=_explain)

    html = commands.add_parser("html", help="write a plan as a web page of its own")
    html.set_defaults(run=_html)

    examine = commands.add_parser("doctor", help="examine whether a model can be captured and sharded")
    examine.set_defaults(run=_doctor)
    examine.add_argument(
        "model", metavar="MODULE:FACTORY", help="a function of a Python module that returns (model, args, kwargs)"
    )
    examine.add_argument("--cluster", default="h100", help="preset or file of the cluster that predicts the seconds")

    for command in (show, explain, html):
        command.add_argument("plan", metavar="PLAN.json", help="file of the plan")
    explain.add_argument("glob", metavar="GLOB", help="parameter names or module paths, such as 'layers.*.mlp'")
    html.add_argument("output", metavar="OUT.html", type=Path, help="file to write")
    return parser


def _show(options: argparse.Namespace) -> None:
    _console().print(plan_table(ShardingPlan.load(options.plan)))


def _explain(options: argparse.Namespace) -> None:
    _console().print(explanation_table(ShardingPlan.load(options.plan), options.glob))


def _html(options: argparse.Namespace) -> None:
    options.output.write_text(page(ShardingPlan.load(options.plan)), "utf-8")
    _console().print(f"wrote {options.output}", markup=False, highlight=False)


def _doctor(options: argparse.Namespace) -> int:
    """Print the report on a model; status 1 where it cannot be captured."""
    report = doctor(*load_example(options.model), cluster=options.cluster)
    _console().print(report_page(report))
    return 0 if report.captured else 1


def _console() -> Console:
    """Standard output; wide enough for the tables where it is a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)


if __name__ == "__main__":
    sys.exit(main())
