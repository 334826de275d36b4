"""The planner of a module's calls: a plan needs one planner for each graph and each set of prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from torch import nn

import autoshard
from autoshard.planner.planning_context import PlanningContext
from tests.runtime.meshes import simulated_mesh
from tests.training import Float64Mode, build, fast_links, unlike_devices


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[Hashable]:
    """Counts of the planners that are made, by graph, prices, limits and shares."""
    counts: Counter[Hashable] = Counter()
    graphs: list[Any] = []  # kept alive, since their identity is the key
    initialise = PlanningContext.__init__

    def count(self: PlanningContext, graph: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, graph, *args, **kwargs)
        graphs.append(graph)
        prices = self.cluster, self.settings.memory_limit, self.settings.recompute
        counts[id(graph), str(prices), str(self.constraints.shared)] += 1

    monkeypatch.setattr(PlanningContext, "__init__", count)
    return counts


def test_a_plan_has_one_planner(made: Counter[Hashable]) -> None:
    module, inputs = build("mlp")
    autoshard.plan(module, {"a": 4}, (), inputs, cluster=fast_links())
    assert made.total() == 1


def test_a_parallelised_module_has_one_planner(made: Counter[Hashable]) -> None:
    with simulated_mesh(a=2) as mesh, Float64Mode():
        module, inputs = build("mlp")
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
    assert made.total() == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "parts": {"shares": {"a": (5, 3)}, "cluster": fast_links()},
    "shares of the batch": {
        "shares": {"a": (2, 1)},
        "dynamic": {"x": {0: "batch"}, "target": {0: "batch"}},
        "cluster": fast_links(),
    },
    "shares in proportion to speed": {"shares": "auto", "cluster": unlike_devices()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_planner_is_made_twice_for_a_plan_in_shares(made: Counter[Hashable], options: dict[str, Any]) -> None:
    module, inputs = build("mlp")
    search = autoshard.Search(effort="fast")
    with simulated_mesh(a=2) as mesh, Float64Mode():
        module, inputs = _double(module, inputs)
        autoshard.parallelize(module, mesh, (), inputs, search=search, recompute="none", **options)
    assert made
    assert set(made.values()) == {1}


def _double(module: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return module.double(), {
        name: value.double() if value.is_floating_point() else value for name, value in inputs.items()
    }
