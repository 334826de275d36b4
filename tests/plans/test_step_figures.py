from __future__ import annotations

from typing import Any

import pytest
from plotly import graph_objects

from autoshard.plans import step_figures
from autoshard.plans.html import Figure
from autoshard.plans.step_figures import layer_of, memory_figure, memory_points, timeline_figure
from autoshard.plans.step_replay import StepReplay
from tests.plans.planned_gpt import planned_gpt
from tests.sample_plan import sample_plan


def check_figure(figure: Figure) -> None:
    """Check that plotly knows every property of a figure."""
    for view in figure.views:
        check_data(view.data, view.layout)


def check_data(data: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    """Check that plotly knows every property of a drawing."""
    graph_objects.Figure(data=_with_colours(data), layout=_with_colours(layout))


def _with_colours(value: Any) -> Any:
    """Return data in which every colour of the page is one that plotly knows."""
    if isinstance(value, str):
        return "#000000" if value.startswith("var(--") else value
    if isinstance(value, list):
        return [_with_colours(item) for item in value]
    return {key: _with_colours(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_the_areas_are_the_bytes_of_the_plan() -> None:
    plan = planned_gpt()
    (figure,) = memory_figure(plan)
    check_figure(figure)
    *areas, line = figure.views[0].data
    size = plan.memory.peak / max(line["y"])
    # A unit is a power of two: nothing is rounded.
    assert size in (2.0**10, 2.0**20, 2.0**30)
    place = line["y"].index(max(line["y"]))
    kinds = {area["fillcolor"]: area["y"][place] * size for area in areas if area["y"][place]}
    assert kinds == {f"var(--{kind})": amount for kind, amount in plan.memory.held.items()}
    sums = [sum(area["y"][moment] for area in areas) for moment in range(len(line["y"]))]
    assert sums == pytest.approx(line["y"])
    assert figure.ranges["Whole step"][1] == line["x"][-1]


def test_moments_that_are_too_many_keep_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_gpt()
    monkeypatch.setattr(step_figures, "_MOMENTS", 10)
    points = memory_points(plan)
    assert len(points) <= 11
    assert max(sum(held.values()) for _, held in points) == plan.memory.peak
    assert [time for time, _ in points] == sorted(time for time, _ in points)


def test_the_bars_are_the_calls_of_the_plan() -> None:
    plan = planned_gpt()
    replay = plan.step_replay
    (figure,) = timeline_figure(plan)
    check_figure(figure)
    data = figure.views[0].data
    second = (replay.seconds + plan.update_seconds) / figure.views[0].layout["xaxis"]["range"][1]
    computed = sum(
        sum(trace["x"]) * second
        for trace in data
        if trace["name"] in ("forward", "backward") and "compute" in trace["y"]
    )
    assert computed == pytest.approx(sum(span.end - span.start for span in replay.compute), rel=1e-6)
    for axis in plan.mesh.names:
        drawn = [x * second for trace in data for row, x in zip(trace["y"], trace["x"], strict=True) if row == axis]
        sent = [span.end - span.start for span in replay.collectives if span.axis == axis]
        assert sorted(drawn) == pytest.approx(sorted(sent))


def test_a_plan_without_a_replay_has_no_chart_of_its_step() -> None:
    assert [*memory_figure(sample_plan()), *timeline_figure(sample_plan())] == []
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
