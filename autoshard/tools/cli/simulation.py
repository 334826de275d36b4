"""The verb `simulate`: the predicted step of a plan, as tables and as a trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import autoshard
from autoshard import PipelinePlan
from autoshard.tools.cli.arguments import UsageError, Verbs, add_verb, check_output, console, parse_mesh, print_line
from autoshard.tools.cli.plan_files import Plan, read_plan
from autoshard.tools.cli.planning import add_dtypes, add_memory, add_options, planning_keywords, print_outputs_left
from autoshard.tools.cli.targets import TARGETS, add_target, load_target


def add_simulate(verbs: Verbs) -> None:
    """Add the verb to the command."""
    parser = add_verb(
        verbs,
        "simulate",
        _simulate,
        details="Print what the predicted step of a plan spends by module and mesh axis, and write the\n"
        "step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.\n"
        "In place of TARGET, a saved plan may stand: PLAN.json, which needs no other option.\n\n"
        f"{TARGETS}\n\n"
        "Exit status 1: no plan fits, or the model cannot be captured.\n"
        "2: an argument is not valid; nothing was planned.",
        example="autoshard simulate plan.json --trace step.json",
    )
    add_target(parser)
    parser.add_argument("--trace", type=Path, metavar="OUT.json", help="trace to write")
    parser.add_argument("--mesh", metavar="AXES", help="of a TARGET, names and sizes of the axes, as in dp=8,tp=8")
    add_memory(parser)
    add_options(parser)
    add_dtypes(parser)


def _simulate(options: argparse.Namespace) -> None:
    """Print the expenses of a step, and write its trace."""
    check_output("--trace", options.trace)
    plan = _plan_of(options)
    if isinstance(plan, PipelinePlan):
        console().print(plan)
    # A pipeline's plan that was built by hand may have no costs.
    if not isinstance(plan, PipelinePlan) or plan.costs:
        console().print(plan.expenses())
    print_outputs_left(plan, options)
    # Written last: what is printed is of use even where a plan has no calls to draw.
    if options.trace is not None:
        plan.trace(options.trace)
        print_line(f"wrote {options.trace}")


def _plan_of(options: argparse.Namespace) -> Plan:
    """Read the plan that the target names, or make one of the model that it names."""
    if options.target.endswith(".json") and ":" not in options.target:
        if options.mesh is not None:
            raise UsageError(
                f"--mesh {options.mesh}: {options.target} is a saved plan, which has a mesh. Leave it out."
            )
        return read_plan(options.target)
    if options.mesh is None:
        raise UsageError(
            f"{options.target} is planned on a mesh: pass --mesh dp=8,tp=8, or name a saved plan, PLAN.json."
        )
    keywords = planning_keywords("plan", options)
    module, args, kwargs = load_target(options)
    return autoshard.plan(module, parse_mesh(options.mesh), args, kwargs, **keywords)
