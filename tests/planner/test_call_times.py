from __future__ import annotations

from itertools import pairwise

import pytest

from autoshard.cluster.cluster import Cluster
from autoshard.planner.account import timeline
from autoshard.planner.planning_problem import Constraints
from tests.planner.steps import every_parameter, flow_of, joint_graph, planner_of


@pytest.mark.parametrize(("mesh", "forced"), [({"x": 2, "y": 2}, False), ({"x": 4}, True)])
def test_the_record_of_a_step_is_its_replay(mesh: dict[str, int], forced: bool) -> None:
    graph = joint_graph("gpt")
    constraints = Constraints(forced=every_parameter(graph) if forced else frozenset())
    planner = planner_of(graph, mesh, constraints, cluster=Cluster.preset("h100"))
    plan = planner.plan()
    record = plan.step_replay
    replayed = timeline(planner.program(flow_of(planner, plan)), planner.prices)
    assert record.seconds == pytest.approx(replayed.seconds, abs=1e-9)
    assert (record.exposed, record.hidden) == pytest.approx((replayed.exposed, replayed.hidden), abs=1e-9)
    contention = planner.cluster.contention
    assert record.seconds + contention * record.hidden == pytest.approx(plan.step_seconds, abs=3e-9)
    # The device runs one kernel after the other, and one collective on each kind of link.
    assert all(before.end <= after.start + 2e-9 for before, after in pairwise(record.compute))
    assert {span.axis for span in record.collectives} <= set(mesh)
    assert bool(record.collectives) is forced
    assert all(0 <= span.moment < len(plan.choices) for span in (*record.compute, *record.collectives))


def test_the_record_of_memory_has_the_peak_of_the_plan() -> None:
    planner = planner_of(joint_graph("gpt"), {"x": 2, "y": 2}, cluster=Cluster.preset("h100"))
    plan = planner.plan()
    held = plan.step_replay.bytes_by_kind(len(plan.choices) + 1)
    totals = [sum(moment) for moment in zip(*held.values(), strict=True)]
    assert max(totals) == plan.memory.peak
    highest = totals.index(max(totals))
    assert {kind: amounts[highest] for kind, amounts in held.items() if amounts[highest]} == plan.memory.held
