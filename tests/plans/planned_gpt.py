"""A plan that the planner made, with the replay of its step."""

from __future__ import annotations

import functools

from autoshard.cluster.cluster import Cluster
from autoshard.planner.planning_problem import Constraints
from autoshard.plans.sharding_plan import ShardingPlan
from tests.planner.steps import every_parameter, joint_graph, planner_of


@functools.cache
def planned_gpt() -> ShardingPlan:
    """Return the plan of a small GPT on four H100s, with all parameters in shards; made once."""
    graph = joint_graph("gpt")
    constraints = Constraints(forced=every_parameter(graph))
    return planner_of(graph, {"x": 4}, constraints, cluster=Cluster.preset("h100")).plan()
