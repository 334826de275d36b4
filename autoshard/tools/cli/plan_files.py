"""Files of one plan."""

from __future__ import annotations

import autoshard
from autoshard import Frontier, PipelinePlan, ShardingPlan
from autoshard.tools.cli.arguments import UsageError

Plan = ShardingPlan | PipelinePlan


def read_plan(path: str) -> Plan:
    """Read a file that a plan or the plan of a pipeline wrote.

    Raises:
        UsageError: the file is a frontier.
        PlanError: as for `autoshard.load_plan`.
    """
    saved = autoshard.load_plan(path)
    if isinstance(saved, Frontier):
        raise UsageError(
            f"{path} is a frontier of {len(saved)} plans, and this command shows one plan: list them with autoshard "
            "show, and save one from Python with autoshard.Frontier.load(...)[number].save(...)."
        )
    return saved
