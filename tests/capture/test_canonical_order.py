"""Captures in processes with other hash seeds, in which sets of strings have another order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture.joint import capture
from tests.capture import set_order_models
from tests.training import TOLERANCE, compare, fast_links, train
from tests.workers import Workers


def test_sets_have_another_order_in_every_worker(two: Workers) -> None:
    first, second = two.run(set_order_models.order)
    assert first != second


@pytest.mark.parametrize("make", set_order_models.MODELS, ids=lambda make: make.__name__)
def test_equal_whatever_the_hash_seed(two: Workers, make: Callable[[], set_order_models.Model]) -> None:
    first, second = two.run(set_order_models.describe_capture, make)
    assert first == second


def _train_beside_one_device() -> None:
    (module, inputs), (alone, _) = set_order_models.tables(), set_order_models.tables()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
    assert compare(train(module, inputs), train(alone, inputs)).worst <= TOLERANCE


def test_ranks_with_other_hash_seeds_train_as_one_device(two: Workers) -> None:
    two.run(_train_beside_one_device)


class Changing(nn.Module):
    """Reads of memory before and behind a change in place, where nothing depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.table * 2
        row = self.table[1:]
        row.add_(x[1:])
        behind = self.table * 3
        noise = torch.ones(3).mul_(before)
        return (self.weight * behind).sum() + (noise * before).sum() + row.sum()


def test_reads_stay_on_their_side_of_a_change_in_place() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    module = Changing()
    graph = capture(module, (x,), {})
    values = {"weight": module.weight.detach(), "table": module.table.clone(), "x": x}
    given = [values.get(item.name, torch.ones(())) for item in graph.inputs]
    results = {one.kind: value for one, value in zip(graph.outputs, graph.graph_module(*given), strict=True)}
    torch.testing.assert_close(results["output"], module(x).detach())
    torch.testing.assert_close(results["mutation"], module.table)
