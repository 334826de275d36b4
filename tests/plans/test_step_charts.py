from __future__ import annotations

import pytest

from autoshard.plans import step_charts
from autoshard.plans.step_charts import layer_of, memory_chart, memory_points, timeline_chart
from autoshard.plans.step_replay import StepReplay
from autoshard.report import Plot
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan


def test_the_areas_are_the_bytes_of_the_plan() -> None:
    plan = planned_gpt()
    (chart,) = memory_chart(plan)
    (plot,) = chart.views
    assert isinstance(plot, Plot)
    *areas, line, peak = plot.series
    place = line.y.index(max(line.y))
    assert line.y[place] == plan.memory.peak
    assert (peak.x, peak.y) == ((line.x[place],), (plan.memory.peak,))
    assert {area.colour: area.y[place] for area in areas if area.y[place]} == plan.memory.held
    assert [sum(area.y[moment] for area in areas) for moment in range(len(line.y))] == list(line.y)
    assert chart.ranges[0] == ("Whole step", 0.0, line.x[-1])


def test_moments_that_are_too_many_keep_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_gpt()
    monkeypatch.setattr(step_charts, "_MOMENTS", 10)
    points = memory_points(plan)
    assert len(points) <= 11
    assert max(sum(held.values()) for _, held in points) == plan.memory.peak
    assert [time for time, _ in points] == sorted(time for time, _ in points)


def test_the_bars_are_the_calls_of_the_plan() -> None:
    plan = planned_gpt()
    replay = plan.step_replay
    (plot,) = timeline_chart(plan).views
    assert isinstance(plot, Plot)
    assert plot.x.ends == (0.0, replay.seconds + plan.update_seconds)
    computed = sum(sum(one.x) for one in plot.series if one.name in ("forward", "backward") and "compute" in one.y)
    assert computed == pytest.approx(sum(span.end - span.start for span in replay.compute), rel=1e-6)
    for axis in plan.mesh.names:
        drawn = [x for one in plot.series for row, x in zip(one.y, one.x, strict=True) if row == axis]
        sent = [span.end - span.start for span in replay.collectives if span.axis == axis]
        assert sorted(drawn) == pytest.approx(sorted(sent))


def test_a_plan_without_a_replay_has_no_chart_of_its_memory() -> None:
    assert list(memory_chart(sample_plan())) == []
    assert StepReplay().seconds == 0.0


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("model.norm", "model.norm"),
        ("model.encoder.norm", "model.encoder"),
        ("lm_head", "lm_head"),
        ("encoder.layers.encoder_layer_3.mlp.0", "encoder.layers.encoder_layer_3"),
        ("", ""),
    ],
)
def test_the_layer_of_a_module(module: str, layer: str) -> None:
    assert layer_of(module) == layer
