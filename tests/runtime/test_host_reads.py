"""No program waits for the device to know what the host knows already."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from autoshard.capture._torch import outside_modes
from autoshard.capture.joint import capture
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.ops.random import draws
from autoshard.planner.planning_problem import Constraints
from autoshard.program.localize import LocalStep, localize
from autoshard.program.split import split
from autoshard.runtime.step import Ranks
from tests import models
from tests.planner.steps import planner_of
from tests.program_lint import aten, host_reads, host_values
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh


class Dropped(nn.Module):
    """Draws in every way in which training does: dropout of features and of channels, noise, masks of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 8, 3, padding=1)
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout1d(self.convolution(x), 0.2)
        x = nn.functional.dropout(self.linear(x), 0.1) + 0.1 * torch.randn_like(x)
        return (x * torch.bernoulli(x.sigmoid())).square().mean()


def _dropped() -> models.Model:
    return Dropped(), {"x": torch.randn(8, 4, 12)}


def _steps(model: models.Model, axes: dict[str, int], seeds: int) -> list[LocalStep]:
    """The step of a model on a mesh, under plans drawn at random."""
    module, inputs = model
    graph = capture(module, (), inputs)
    with simulated_mesh(**axes) as mesh:
        planner = planner_of(graph, axes, Constraints())
        groups = Ranks(mesh, torch.device("cpu")).groups
        steps = []
        for seed in range(seeds):
            plan = random_plan(graph, planner.mesh, seed, forced=0.5, planned_outputs=True)
            flow = Flow(planner.rules, Decisions.from_data(plan.decisions), planner.mesh)
            with outside_modes():
                steps.append(localize(flow, planner.resharder, groups))
    return steps


@pytest.mark.parametrize(("name", "axes"), [("dropped", {"x": 4}), ("dropped", {"x": 2, "y": 2}), ("gpt", {"x": 4})])
def test_coordinates_and_seeds_are_all_that_the_host_reads(name: str, axes: dict[str, int]) -> None:
    model = _dropped() if name == "dropped" else models.gpt(layers=1, dropout=0.1)
    steps = _steps(model, axes, seeds=2)
    for step in steps:
        assert not host_reads(step.graph_module.graph)
        for half in split(step, compile=False).graphs:
            assert not host_reads(half)
    drawn = [node for step in steps for node in step.graph_module.graph.nodes if _draws(node)]
    assert drawn
    assert any(node.kwargs.get("shard", node.args[-1]) is not None for node in drawn)


def _draws(node: fx.Node) -> bool:
    return node.target in (draws.bernoulli.default, draws.normal.default, draws.uniform.default)


def _graph(op: torch._ops.OpOverload, *names: str) -> fx.Graph:
    """A program of one call on tensors of the device, coordinates and a seed."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in names]
    for node in nodes:
        node.meta["val"] = torch.ones(2, dtype=torch.int64)
    node = graph.call_function(op, tuple(nodes))
    node.meta["val"] = torch.ones(2)
    return graph


@pytest.mark.parametrize(
    ("op", "names", "why"),
    [
        (aten._local_scalar_dense.default, ["primals_0"], "tells the host"),
        (aten.nonzero.default, ["primals_0"], "tells the host"),
        (aten.masked_select.default, ["primals_0", "primals_1"], "tells the host"),
        (aten.mul.Tensor, ["primals_0", "host_coordinate_x"], "mixes"),
        (aten.add.Tensor, ["primals_0", "seed"], "mixes"),
    ],
)
def test_reads_are_found(op: torch._ops.OpOverload, names: list[str], why: str) -> None:
    (fault,) = host_reads(_graph(op, *names))
    assert why in fault.problem


def test_what_follows_from_the_coordinates_of_the_host_is_on_the_host() -> None:
    graph = _graph(aten.add.Tensor, "host_coordinate_x", "host_coordinate_y")
    assert host_values(graph) == set(graph.nodes)
    assert not host_reads(graph)


def test_a_draw_whose_shard_is_on_the_device_is_found() -> None:
    graph = fx.Graph()
    seed, shard = graph.placeholder("seed"), graph.placeholder("coordinate_x")
    keywords = {"dtype": torch.float32, "device": torch.device("cpu")}
    graph.call_function(draws.bernoulli.default, ([2], 0.5, seed, 0, shard), keywords)
    for node in graph.nodes:
        node.meta["val"] = torch.ones(2)
    (fault,) = host_reads(graph)
    assert "on the device" in fault.problem
