from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.operators.recurrent.recurrence import steps
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import shard_placement
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests import models
from tests.models.recurrent import LstmLanguageModel
from tests.patterns.ops.soundness import bound, normal
from tests.patterns.units.unit_models import build_seeded
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, build, compare, fast_links, train

GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


class Layer(nn.Module):
    """A recurrent layer and the mean square of its outputs and last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, last = self.layer(x)
        return sum(state.square().mean() for state in (output, *(last if isinstance(last, tuple) else (last,))))


def layer_of(make: Callable[[], nn.Module]) -> Callable[[], models.Model]:
    """A layer on one sample of three steps: there is nothing to shard but its units."""
    return lambda: (build_seeded(lambda: Layer(make())), {"x": normal(3, 1, 6)})


MODELS = {
    "lstm language model": lambda: build("lstm", batch=1),
    "lstm both ways": layer_of(lambda: nn.LSTM(6, 8, bidirectional=True)),
    "gru": layer_of(lambda: nn.GRU(6, 8, 2)),
    "rnn": layer_of(lambda: nn.RNN(6, 8)),
    "lstm of ten units": layer_of(lambda: nn.LSTM(6, 10)),
}


def hinted(module: nn.Module) -> dict[str, Any]:
    """Every rank has all gates of some units of all recurrent layers."""
    return {
        f"{path}.{name}": shard_placement(0, GATES[type(layer)])
        for path, layer in module.named_modules()
        if type(layer) in GATES
        for name, _ in layer.named_parameters()
        if "weight" in name
    }


def strategies(plan: ShardingPlan) -> set[str]:
    """Those of the time loops."""
    return {decision.strategy for decision in plan.choices if "_steps" in decision.operator}


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 4) for name in MODELS if name != "lstm language model"), ("lstm language model", 2)]
)
def test_layers_whose_units_are_shared_train_as_on_one_device(name: str, size: int) -> None:
    module, inputs = MODELS[name]()
    with Float64Mode():
        reference = train(module, inputs, 2)
    module, inputs = MODELS[name]()
    hints = hinted(module) if name != "lstm of ten units" else {}
    with simulated_mesh(tp=size) as mesh:
        with Float64Mode():
            autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), hints=hints)
        with default_float64():
            trace = train(module, inputs, 2)
    assert compare(trace, reference).worst <= TOLERANCE
    assert strategies(module.sharding_plan) == {"h on tp"}
    for path, placement in hints.items():
        assert trace.placements[path] == (placement,)


@pytest.mark.parametrize(
    ("batch", "hidden", "cluster", "chosen"),
    [
        (1, 1024, "fast links", "h on tp"),
        (64, 1024, "fast links", "b on tp"),
        (1, 4096, "h100", "h on tp"),
        (1, 256, "h100", "whole"),
        (64, 1024, "h100", "b on tp"),
    ],
)
def test_what_is_shared_is_what_is_cheaper(batch: int, hidden: int, cluster: str, chosen: str) -> None:
    """Units where the weight is what each step waits for, samples where there are many, neither on slow links."""
    with torch.device("meta"):
        module = LstmLanguageModel(hidden)
        tokens = torch.zeros(batch, 64, dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    links = fast_links() if cluster == "fast links" else cluster
    assert strategies(autoshard.plan(module, {"tp": 4}, (), inputs, cluster=links)) == {chosen}


def test_every_time_step_is_priced() -> None:
    cells, states, weight = normal(5, 2, 12), normal(2, 12), normal(48, 12)
    gates = normal(5, 2, 48)
    tables = StrategyTables(CostModel(Cluster.preset("h100"), MeshShape.of({"x": 2, "y": 2})))
    _, rule = bound(steps.lstm_steps.default, gates, states, states, weight, None)
    (h,), (b,) = rule.indices("h"), rule.indices("b")
    assert tables.exchanges(rule, (h, -1)) == [("all_gather", 0, 2 * 12 * 8 // 2)] * 5
    assert tables.exchanges(rule, (b, h)) == [("all_gather", 1, 12 * 8 // 2)] * 5
    _, rule = bound(steps.lstm_steps_backward.default, cells, None, states, weight, None, cells, gates)
    (h,) = rule.indices("h")
    assert tables.exchanges(rule, (h, -1)) == [("reduce_scatter", 0, 2 * 12 * 8)] * 5


def test_a_step_reads_the_weight_again() -> None:
    tables = StrategyTables(CostModel(Cluster.preset("cpu"), MeshShape.of({"x": 2})))
    seconds = []
    for times in (10, 20):
        meta = [torch.empty(shape, device="meta") for shape in ((times, 1, 4096), (1, 1024), (1, 1024), (4096, 1024))]
        call, rule = bound(steps.lstm_steps.default, *meta, None)
        seconds.append(tables.compute_seconds(call, rule, (-1,)))
    overhead = tables.cost.cluster.device.kernel_overhead
    assert seconds[1] - overhead == pytest.approx(2 * (seconds[0] - overhead))
