"""Planners of the calls of one module: what one works out serves the others, and changes none of their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.capture.joint import capture
from autoshard.options.target import Target
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache, run_planner
from autoshard.specs.axes import MeshShape
from tests.targets import target
from tests.training import build

MESH = MeshShape.of({"a": 2, "b": 2})


def _target(**changes: Any) -> Target:
    return target("cpu", effort="fast", **changes)


def _graphs(module: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    half = {name: tensor[: len(tensor) // 2] for name, tensor in inputs.items()}
    return [capture(module, (), call, grad=grad) for call, grad in ((inputs, True), (inputs, False), (half, True))]


def test_later_calls_are_planned_as_if_they_were_the_first_from_what_was_worked_out_before() -> None:
    module, inputs = build("mlp")
    options = _target()
    planners = PlannerCache(module, MESH)
    first: Planner | None = None
    for graph in _graphs(module, inputs):
        planner = planners.of(graph, options)
        first = first or planner
        assert planner.resharder is first.resharder
        found = run_planner(planner, 0.0, options)
        alone = run_planner(PlannerCache(module, MESH).of(graph, options), 0.0, options)
        assert replace(found, timings={}) == replace(alone, timings={})
    assert first is not None
    assert first.best is not None
    planners.forget()
    assert first.best is None


def test_planners_at_other_prices_work_out_their_own() -> None:
    module, inputs = build("mlp")
    graph = capture(module, (), inputs)
    planners = PlannerCache(module, MESH)
    one, other = (planners.of(graph, _target(optimizer=optimizer)) for optimizer in ("adamw", "sgd"))
    assert one.resharder is not other.resharder
