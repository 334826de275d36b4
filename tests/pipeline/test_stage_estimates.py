from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.cluster.cost import CostModel
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from autoshard.pipeline.graph.stage_problem import StageDevice
from autoshard.pipeline.graph.stages import assign_stages
from autoshard.pipeline.plan.planned_stage import Links
from autoshard.pipeline.plan.stage_estimates import StageTotals, estimate_stage_costs, totals_at
from autoshard.specs.axes import MeshShape
from tests.pipeline.exporting import export_call
from tests.pipeline.small_pipelines import tower
from tests.training import fast_links

AT_4 = StageTotals(
    forward=5.0, backward=9.0, weights=4.0, saved=400.0, rest=70.0, working=8.0, application=2.0, sent=0.5
)
AT_8 = StageTotals(
    forward=9.0, backward=17.0, weights=8.0, saved=800.0, rest=70.0, working=16.0, application=2.0, sent=0.5
)


def test_totals_lie_on_a_line() -> None:
    known = {4: AT_4, 8: AT_8}
    assert totals_at(4, known) == AT_4
    assert totals_at(16, {4: AT_4, 8: replace(AT_8, reduction=3.0)}).reduction == 3.0  # once per step
    assert totals_at(16, known) == StageTotals(17.0, 33.0, 16.0, 1600.0, 70.0, 32.0, 2.0, 0.5)
    assert totals_at(1, known) == StageTotals(2.0, 3.0, 1.0, 100.0, 70.0, 2.0, 2.0, 0.5)
    far = known | {64: StageTotals(*[1e9] * 8)}
    assert totals_at(6, far) == totals_at(6, known)


def test_totals_of_one_size_grow_in_proportion() -> None:
    twice = totals_at(8, {4: AT_4})
    assert (twice.forward, twice.backward, twice.weights, twice.saved, twice.rest) == (10.0, 18.0, 8.0, 800.0, 70.0)


def test_stages_have_their_share_of_the_totals() -> None:
    cluster = fast_links()
    module, inputs = tower()
    graph = read_stage_graph(export_call(module, inputs), CostModel(cluster, MeshShape.of({"device": 1})))
    stages = assign_stages(graph, [StageDevice(1e9)] * 3, [3, 2, 1])
    links = Links.of(cluster, MeshShape.of({"pp": 3, "x": 2}), "pp")
    totals = replace(StageTotals.without_communication(graph, 2), reduction=4.0)
    assert totals.forward + totals.backward == pytest.approx(graph.seconds / 2)
    costs = estimate_stage_costs(stages, graph, totals, 2.0, links)
    assert sum(cost.forward_seconds for cost in costs) == pytest.approx(totals.forward)
    assert sum(cost.backward_seconds for cost in costs) == pytest.approx(totals.backward)
    assert sum(cost.rest_bytes for cost in costs) == pytest.approx(totals.rest, abs=3)
    assert [cost.forward_bytes for cost in costs] == [2 * amount for amount in (*stages.totals.forward_bytes, 0)]
    assert [cost.backward_bytes for cost in costs] == [2 * amount for amount in (0, *stages.totals.backward_bytes)]
    again = StageTotals.of(costs, [1.0] * 3, 2 * sum(stages.totals.forward_bytes))
    assert again.forward == pytest.approx(totals.forward)
    assert again.backward == pytest.approx(totals.backward)
    assert again.weights == pytest.approx(totals.weights)
    assert again.sent == 1.0
    assert again.reduction == pytest.approx(4.0)
