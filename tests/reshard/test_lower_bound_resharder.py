"""Prices that no path is below: never above the exact ones, and equal to them where nothing was forgotten."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.reshard.lower_bound_resharder import LowerBoundResharder
from autoshard.reshard.path import Resharder
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec, shard_placement

MESH = MeshShape.of({"a": 2, "b": 2, "c": 4})
SHAPE = (32, 48)


def _both() -> tuple[Resharder, LowerBoundResharder]:
    cost = CostModel(Cluster.of("h100"), MESH)
    return (
        Resharder(MESH, cost.collective, cost.gradient_collective),
        LowerBoundResharder(MESH, cost.collective, cost.gradient_collective),
    )


def _specs() -> list[Spec]:
    plain = [Replicate(), Shard(0), Shard(1), Partial("sum")]
    strided = [shard_placement(0, 2), Shard(0), Shard(1), Replicate()]
    every = [Spec.of(*placements) for placements in itertools.product(plain, repeat=3)]
    return every[::3] + [Spec.of(*placements) for placements in itertools.product(strided, repeat=3)][::7]


@pytest.mark.parametrize("gradient", [False, True])
def test_no_path_costs_less(gradient: bool) -> None:
    exact, loose = _both()
    if gradient:
        exact, loose = exact.gradients, loose.gradients
    specs = _specs()
    prices = exact.seconds(SHAPE, 4, specs, specs)
    floors = loose.seconds(SHAPE, 4, specs, specs)
    assert np.all(floors <= prices * (1 + 1e-12))
    assert np.all(floors[prices == 0] == 0)


def test_a_single_collective_on_a_whole_tensor_has_its_price() -> None:
    exact, loose = _both()
    whole, summed = Spec.all_replicated(3), Spec.of(Replicate(), Replicate(), Partial("sum"))
    sharded = Spec.of(Shard(0), Replicate(), Replicate())
    for source, target in ((summed, whole), (sharded, whole)):
        price = exact.seconds(SHAPE, 4, [source], [target])
        assert loose.seconds(SHAPE, 4, [source], [target]) == pytest.approx(price, rel=1e-9)
