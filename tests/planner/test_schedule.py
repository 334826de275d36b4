"""The timeline of a plan issues what the program issues, in its order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from autoshard.planner.account import LOCAL_STEPS, Account
from autoshard.planner.problem import Wishes
from autoshard.planner.schedule import issued, step_seconds, timeline
from autoshard.reshard.overlap import await_late, gather_ahead
from tests.planner.steps import (
    KINDS,
    account_of,
    bytes_of,
    captured,
    every_parameter,
    halves_of,
    links,
    planner_of,
    program_of,
)


def _forced(name: str, mesh: Mapping[str, int]) -> tuple[Account, list[list[tuple[str, int]]]]:
    """The account of a plan that shards every parameter, and the collectives of both halves as programs run them."""
    graph = captured(name)
    planner = planner_of(graph, mesh, Wishes(forced=every_parameter(graph)))
    plan = planner.plan()
    ran = []
    for half in halves_of(program_of(planner, plan)):
        await_late(half.graph)
        gather_ahead(half.graph)
        nodes = (node for node in half.graph.nodes if node.target in KINDS)
        ran.append([(KINDS[node.target], bytes_of(node.args[0])) for node in nodes])
    return account_of(planner, plan), ran


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, {"x": 2, "y": 2}], ids=str)
def test_collectives_are_issued_in_the_order_of_the_program(mesh: Mapping[str, int]) -> None:
    account, ran = _forced("mlp", mesh)
    said: dict[str, list[tuple[str, int]]] = {"forward": [], "backward": []}
    for _, leg, steps in sorted(issued(account), key=lambda one: one[0]):
        said[leg.phase] += [(step.kind, step.bytes) for step in steps if step.kind not in LOCAL_STEPS]
    assert any(kind == "all_gather" for kind, _ in said["forward"])
    assert list(said.values()) == ran


def test_a_parameter_is_gathered_while_the_one_before_it_is_used() -> None:
    account, _ = _forced("gpt", {"x": 2})
    gathers = [
        (position, leg.position)
        for position, leg, steps in issued(account)
        if leg.phase == "forward" and steps and steps[0].kind == "all_gather" and leg.value.node.op == "placeholder"
    ]
    assert len(gathers) >= 2
    for (_, used), (start, _) in itertools.pairwise(gathers):
        assert start == used
    assert gathers[-1][0] < gathers[-1][1]


def test_the_predicted_step_lies_between_the_timeline_and_the_sum() -> None:
    planner = planner_of(captured("gpt", batch=8), {"x": 4}, cluster=links(4e9, 1e-6))
    plan = planner.plan()
    account = account_of(planner, plan)
    replayed = timeline(account)
    assert replayed.hidden > 0
    assert replayed.seconds < step_seconds(account) == plan.step_seconds <= plan.cost
