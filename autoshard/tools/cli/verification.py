"""The verb `verify`."""

from __future__ import annotations

import argparse

import autoshard
from autoshard import ShardingPlan
from autoshard.tools.cli.arguments import UsageError, Verbs, add_verb, console, parse_mesh, usage_errors
from autoshard.tools.cli.planning import add_memory, add_mesh, add_options, planning_keywords
from autoshard.tools.cli.targets import TARGETS, add_target, load_target


def add_verify(verbs: Verbs) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "verify",
        _verify,
        details="Train a small model with the programs of a plan, all ranks in this process, in float64\n"
        "on the CPU, and compare every loss, output, gradient, parameter and buffer with those of\n"
        f"one device. Faults of rules are found and named. No device is needed.\n\n{TARGETS}\n\n"
        "Exit status 1: a number differs, or the model cannot be captured. 2: an argument is not\n"
        "valid; nothing was trained.",
        example="autoshard verify hf:llama/config.json --batch 4 --seq 16 --set num_hidden_layers=2 \\\n"
        "    --set hidden_size=256 --mesh dp=2,tp=2",
    )
    add_target(parser)
    add_mesh(parser)
    parser.add_argument("--plan", metavar="PLAN.json", help="a saved plan of this model and mesh; by default a new one")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="training steps; default: 3")
    add_memory(parser)
    add_options(parser)


def _verify(options: argparse.Namespace) -> int:
    """Print the report; status 1 where a number differs."""
    if options.steps < 1:
        raise UsageError(f"--steps {options.steps}: pass a number of training steps, 1 or more.")
    keywords = planning_keywords("verify", options)
    plan = None if options.plan is None else _read_sharding_plan(options.plan)
    model, args, kwargs = load_target(options, "cpu")
    report = autoshard.verify(model, parse_mesh(options.mesh), args, kwargs, plan=plan, steps=options.steps, **keywords)
    console().print(report)
    return 0 if report.ok else 1


def _read_sharding_plan(path: str) -> ShardingPlan:
    with usage_errors():
        plan = autoshard.load_plan(path)
    if not isinstance(plan, ShardingPlan):
        raise UsageError(f"--plan {path}: verify runs a plan without a pipeline, and this is a {type(plan).__name__}.")
    return plan
