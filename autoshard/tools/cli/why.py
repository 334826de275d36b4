"""The verb `why`: what a plan would cost with other placements than it has."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import autoshard
from autoshard import Alternative, HintError, Pipeline, PipelinePlan, ShardingPlan
from autoshard.tools.cli.arguments import (
    UsageError,
    Verbs,
    add_verb,
    check_output,
    console,
    parse_hints,
    parse_mesh,
    print_line,
    usage_errors,
)
from autoshard.tools.cli.plan_files import read_plan
from autoshard.tools.cli.planning import (
    add_dtypes,
    add_memory,
    add_options,
    add_pipeline,
    planning_keywords,
    print_outputs_left,
)
from autoshard.tools.cli.targets import TARGETS, add_target, load_target


def add_why(verbs: Verbs) -> None:
    """Add the verb to the command."""
    parser = add_verb(
        verbs,
        "why",
        _why,
        details="Find the best plan that has the placements asked for, and print what it costs more or\n"
        "less than the plan made without them: seconds, collectives and memory by module.\n"
        "With --plan, the options are those that the saved plan was made with.\n\n"
        f"{TARGETS}\n\n"
        "PLACEMENTS are S(0) or R for every mesh axis, tp:S(0),dp:R for some, or a primitive:\n"
        "split(tp), replicate(4). A glob of a module stands for the parameters below it.\n"
        "Of a pipeline, schedule=NAME, microbatches=N and virtual=N can be asked for, too.\n\n"
        "Exit status 0: a plan has them. 1: no plan can, or none fits the memory.\n"
        "2: an argument is not valid; nothing was planned, or a glob matches nothing.",
        example="autoshard why hf:llama/config.json --batch 16 --seq 4096 --mesh dp=8,tp=8 \\\n"
        "    'model.layers.*.mlp.up_proj.weight=tp:S(0)'",
    )
    add_target(parser)
    parser.add_argument("asked", nargs="+", metavar="GLOB=PLACEMENTS", help="what the plan should have")
    places = parser.add_mutually_exclusive_group(required=True)
    places.add_argument(
        "--mesh", metavar="AXES", help="names and sizes of the axes, as in dp=8,tp=8; makes a plan first"
    )
    places.add_argument("--plan", metavar="PLAN.json", help="a saved plan of the target, to ask in place of a new one")
    add_memory(parser)
    add_options(parser)
    add_dtypes(parser)
    add_pipeline(parser)
    parser.set_defaults(cluster=None)
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.json", help="file to write the plan with them to")


def _why(options: argparse.Namespace) -> int:
    """Print the alternative; status 0 where there is one, else 1."""
    check_output("-o", options.output)
    plan = None if options.plan is None else read_plan(options.plan)
    if plan is None:
        options.cluster = options.cluster or "h100"
    else:
        options.mesh = ",".join(f"{axis.name}={axis.size}" for axis in plan.mesh.axes)
        options.cluster = options.cluster or plan.cluster
        if isinstance(plan, PipelinePlan):
            options.axis = plan.axis
    mesh = parse_mesh(options.mesh)
    keywords = planning_keywords("why_not", options)
    has_pipeline = autoshard.check_options("why_not", mesh, **keywords).pipeline.axis is not None
    requests = _requests(options.asked) if has_pipeline else {}
    asked = parse_hints([text for text in options.asked if text.partition("=")[0] not in requests], mesh)
    module, args, kwargs = load_target(options)
    alternative: Alternative[ShardingPlan] | Alternative[PipelinePlan]
    try:
        if plan is not None:
            alternative = autoshard.why_not(plan, asked, module, args, kwargs, requests=requests, **keywords)
        else:
            made = autoshard.plan(module, mesh, args, kwargs, **keywords)
            print_outputs_left(made, options)
            alternative = made.why_not(asked) if isinstance(made, ShardingPlan) else made.why_not(asked, **requests)
    except HintError as error:
        raise UsageError(str(error)) from error
    console().print(alternative)
    return _write(alternative, options.output)


def _requests(texts: Iterable[str]) -> dict[str, Any]:
    """Return the options of a pipeline among texts such as `"schedule=1F1B"` and `"microbatches=8"`.

    Raises:
        UsageError: an option occurs twice, or its value is not valid.
    """
    requests: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name in ("schedule", "microbatches", "virtual"):
            if name in requests:
                raise UsageError(f"{text!r}: {name} occurs twice.")
            requests[name] = int(value) if name != "schedule" and value.isdecimal() else value
    with usage_errors():
        autoshard.check_options("why_not", pipeline=Pipeline(**requests))
    return requests


def _write(alternative: Alternative[ShardingPlan] | Alternative[PipelinePlan], path: Path | None) -> int:
    """Write the plan of an alternative if there is one and a path; return the exit status."""
    if alternative.plan is None:
        return 1
    if path is not None:
        alternative.plan.save(path)
        print_line(f"wrote {path}")
    return 0
