"""The verbs that show saved plans: `show`, `explain` and `html`."""

from __future__ import annotations

import argparse
from pathlib import Path

import autoshard
from autoshard.tools.cli.arguments import UsageError, Verbs, add_verb, check_output, console, print_line
from autoshard.tools.cli.plan_files import read_plan


def add_show(verbs: Verbs) -> None:
    """Add the verb `show`."""
    show = add_verb(
        verbs,
        "show",
        _show,
        details="Print a saved plan, plan of a pipeline, or frontier as tables.",
        example="autoshard show plan.json",
    )
    _add_file(show)


def add_explain(verbs: Verbs) -> None:
    """Add the verb `explain`."""
    explain = add_verb(
        verbs,
        "explain",
        _explain,
        details="Print the placements, strategies and costs of the parameters and modules that a glob matches.",
        example="autoshard explain plan.json 'model.layers.0.mlp'",
    )
    _add_file(explain)
    explain.add_argument("glob", metavar="GLOB", help="glob of parameter names or module paths, such as 'layers.*.mlp'")


def add_html(verbs: Verbs) -> None:
    """Add the verb `html`."""
    html = add_verb(
        verbs,
        "html",
        _html,
        details="Write a saved plan, plan of a pipeline, or frontier as a web page that loads nothing else.",
        example="autoshard html plan.json plan.html",
    )
    _add_file(html)
    html.add_argument("output", metavar="OUT.html", type=Path, help="file to write")
    html.add_argument(
        "--memory", metavar="BYTES", help="of a frontier, show the fastest plan within it; default: the turning point"
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN.json", help="file of the plan")


def _show(options: argparse.Namespace) -> None:
    console().print(autoshard.load_plan(options.plan))


def _explain(options: argparse.Namespace) -> None:
    console().print(read_plan(options.plan).explanation(options.glob))


def _html(options: argparse.Namespace) -> None:
    check_output("OUT.html", options.output)
    saved = autoshard.load_plan(options.plan)
    if options.memory is None:
        saved.to_html(options.output)
    elif isinstance(saved, autoshard.Frontier):
        saved.to_html(options.output, chosen=saved.at(memory=options.memory))
    else:
        raise UsageError(f"--memory {options.memory} selects a plan of a frontier, and {options.plan} is one plan.")
    print_line(f"wrote {options.output}")
