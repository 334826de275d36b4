"""Planners of the calls of one module: what one works out serves the others, and changes none of their plans.

Cycles that planning makes are freed while it runs; those of what was there before are freed later.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from autoshard.capture.joint import capture
from autoshard.options.target import Target
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache, freeze_older_objects, run_planner
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


class _Cycle:
    def __init__(self) -> None:
        self.own = self


def _dropped() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.fixture
def nothing_set_aside() -> Iterator[None]:
    """Nothing frozen, as in a user's process: the test session freezes all objects before its first test."""
    thresholds = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, *thresholds[1:])
    yield
    gc.set_threshold(*thresholds)
    gc.freeze()


def test_only_newer_cycles_are_freed_inside_and_older_ones_after(nothing_set_aside: None) -> None:
    thresholds = gc.get_threshold()
    older = _dropped()
    with freeze_older_objects():
        with freeze_older_objects():
            newer = _dropped()
        gc.collect()
        assert newer() is None
        assert older() is not None
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds
    gc.collect()
    assert older() is None


def test_what_others_set_aside_stays_so() -> None:
    assert gc.get_freeze_count() > 0
    with freeze_older_objects():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0
