"""The collectives of a plan's account are those of its programs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autoshard.planner.planning_problem import Constraints
from tests.planner.steps import (
    account_of,
    collectives_of,
    every_parameter,
    halves_of,
    joint_graph,
    plan_of,
    planned_collectives,
    planner_of,
    program_of,
    regather_all,
)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("mlp", {"x": 2, "y": 2}), ("gpt", {"x": 2}), ("gpt", {"x": 4}), ("hf_bert", {"x": 4}), ("mlp", {"x": 1, "y": 3})],
)
@pytest.mark.parametrize("kind", ["free", "forced", "gathered again"])
def test_the_programs_run_the_collectives_of_the_plan(name: str, mesh: Mapping[str, int], kind: str) -> None:
    graph = joint_graph(name)
    planner = planner_of(graph, mesh, Constraints(forced=frozenset() if kind == "free" else every_parameter(graph)))
    plan = planner.plan()
    if kind == "gathered again":
        plan = regather_all(planner, plan)
        assert any("@backward" in key for key in plan.decisions["hubs"])
    assert plan.collectives
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_plan_that_leaves_outputs_sharded() -> None:
    planner = planner_of(joint_graph("mlp"), {"x": 3}, Constraints(planned_outputs=True))
    plan = planner.plan()
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_the_programs_run_the_collectives_of_a_forward_pass() -> None:
    planner = planner_of(joint_graph("gpt", grad=False), {"x": 2})
    plan = planner.plan()
    assert plan.collectives
    assert {record.phase for record in plan.collectives} == {"forward"}
    assert collectives_of(*halves_of(program_of(planner, plan))) == planned_collectives(plan)


def test_collectives_of_uneven_parameters_are_counted() -> None:
    """The bytes of a reduce-scatter that pads are those before padding."""
    graph = joint_graph("mlp")
    planner = planner_of(graph, {"x": 5}, Constraints(forced=every_parameter(graph)))
    plan = planner.plan()
    ran, said = collectives_of(*halves_of(program_of(planner, plan))), planned_collectives(plan)
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert sum(n for key, n in ran.items() if key[0] == kind) == sum(n for key, n in said.items() if key[0] == kind)


def test_every_collective_has_a_module_a_phase_and_a_price() -> None:
    plan = plan_of(joint_graph("gpt"), {"x": 4})
    assert {record.phase for record in plan.collectives} == {"forward", "backward"}
    assert any(record.module.startswith("layers.0") for record in plan.collectives)
    assert all(record.seconds > 0 and record.bytes > 0 and record.count > 0 for record in plan.collectives)


def test_gradients_are_reduced_behind_the_backward_compute() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2})
    account = account_of(planner, planner.plan())
    operators = len(account.rules.operators)
    reductions = [leg for leg in account.reshards if leg.phase == "backward" and leg.position < operators]
    assert reductions
