"""Plans made without a GPU, quickly: `plans.py FOLDER [MODEL ...]`."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.capture.offloading import movable_values, offload_values
from autoshard.options.target import Settings
from autoshard.patterns.decisions import Decisions
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.solver.solve import solve
from autoshard.specs.axes import MeshShape
from tests.fake_cuda.cases import MOVED, Case, build, cases, pipelines
from tests.random_plans import plan_of
from tests.training import fast_links

SECONDS = 2.0  # of search per axis
SMALL = 340  # nodes of a graph whose decisions for two axes take a second or two


def plan_axis_by_axis(graph: JointGraph, mesh: MeshShape) -> ShardingPlan:
    """A plan found one axis after another, which for small models takes a tenth of what a search takes.

    The last two axes are used, or the last one alone where the graph is large.
    """
    planner = Planner(graph, mesh, fast_links(), Constraints(), Settings())
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    used = 2 if len(graph.graph_module.graph.nodes) <= SMALL else 1
    decisions: Decisions | None = None
    for axis in range(mesh.ndim)[-used:]:
        built = builder.build(frozenset([axis]), decisions)
        decisions = built.decode(solve(built.problem, time_limit=SECONDS).assignment)
    assert decisions is not None
    return plan_of(graph, mesh, decisions)


def write_plan(case: Case, folder: Path) -> None:
    """The plan of a model, as a file."""
    module, inputs = build(case.model)
    graph = capture(module, (), inputs)
    moved = list(movable_values(graph))[::2] if case.model in MOVED else ()
    plan_axis_by_axis(offload_values(graph, moved), MeshShape.of(case.axes())).save(folder / case.plan)


def write_pipeline_plan(case: Case, folder: Path) -> None:
    """The plan of a pipeline of two stages, each sharded."""
    module, inputs = build(case.model)
    options: dict[str, Any] = {"cluster": fast_links(), "effort": "fast", "time_limit": 5.0}
    plan = autoshard.plan(
        module, case.axes(), (), inputs, pipeline=autoshard.Pipeline(schedule="1F1B", microbatches=2), **options
    )
    plan.save(folder / case.plan)


def main() -> None:
    """Plan all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", help="all of the zoo by default")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # operators without a rule
    logging.disable(logging.WARNING)
    for write, made in ((write_plan, cases()), (write_pipeline_plan, pipelines())):
        for case in made:
            if not asked.models or case.model in asked.models:
                write(case, asked.folder)


if __name__ == "__main__":
    main()
