"""Saved plans of every kind."""

from __future__ import annotations

import re

from autoshard.pipeline.plan.pipeline_plan import FORMAT as PIPELINE
from autoshard.pipeline.plan.pipeline_plan import PipelinePlan
from autoshard.plans import frontier, plan_data
from autoshard.plans.frontier import Frontier
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.tools.cli.arguments import UsageError

Plan = ShardingPlan | PipelinePlan

# The format is the first entry of a file, and a frontier's plans have formats of their own later.
_HEAD = re.compile(r'\A\s*\{\s*"format"\s*:\s*"(?P<format>[^"]*)"')


def read_saved(path: str) -> Plan | Frontier:
    """Read a file that a plan, the plan of a pipeline, or a frontier wrote.

    Raises:
        PlanError: the file cannot be read, is cut short or edited, or is none of these.
    """
    text, what = plan_data.read(path)
    head = _HEAD.match(text)
    kind = head["format"] if head is not None else ""
    if kind == PIPELINE.name:
        return PipelinePlan.from_json(text, what)
    if kind == frontier.FORMAT:
        return Frontier.load(path)
    return ShardingPlan.from_json(text, what)


def read_plan(path: str) -> Plan:
    """Read a file that a plan or the plan of a pipeline wrote.

    Raises:
        UsageError: the file is a frontier.
        PlanError: as for `read_saved`.
    """
    saved = read_saved(path)
    if isinstance(saved, Frontier):
        raise UsageError(
            f"{path} is a frontier of {len(saved)} plans, and this command shows one plan: list them with autoshard "
            "show, and save one from Python with autoshard.Frontier.load(...)[number].save(...)."
        )
    return saved
