"""Prices of many pairs from one graph against those from a graph for each two groups."""

import random

import numpy as np
import pytest

from autoshard.reshard import path
from autoshard.reshard.path import Resharder
from autoshard.reshard.states import closure, plain_nests, spec_of_state, state_graph
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec

CASES = [
    ({"a": 2, "b": 2}, (4, 2, 4, 16)),
    ({"a": 2, "b": 2}, (16, 64, 64)),
    ({"a": 2, "b": 4}, (4, 64, 96)),
    ({"a": 2, "b": 2, "c": 2}, (8, 24)),
    ({"a": 4}, (8, 16, 4)),
]
SECONDS = {"all_gather": 1e-6, "copy": 3e-7, "all_to_all": 2e-6}


def _price(kind: str, amount: int, axis: int) -> float:
    return SECONDS.get(kind, 1.5e-6) + amount * (1e-11 if kind == "copy" else 1e-10) * (1 + axis)


def _specs(shape: tuple[int, ...], mesh: MeshShape, chance: random.Random) -> list[Spec]:
    """Specs of shards and of strided shards, with steps above them of several sizes."""
    nests = []
    for size in shape:
        result = set(plain_nests(size, mesh))
        for outer in (2, 3, 4, 8):
            if size % outer == 0:
                more = plain_nests(size // outer, mesh)
                result |= {tuple(loop._replace(outer=loop.outer * outer) for loop in nest) for nest in more}
        nests.append(closure(result, mesh))
    states = state_graph(tuple(nests), frozenset({"sum"}), mesh).states
    return [spec_of_state(state, shape, mesh) for state in chance.sample(states, min(len(states), 24))]


@pytest.mark.parametrize(("axes", "shape"), CASES)
def test_one_graph_prices_every_pair_as_its_own_graph_does(
    axes: dict[str, int], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, chance = MeshShape.of(axes), random.Random(0)
    sources, targets = _specs(shape, mesh, chance), _specs(shape, mesh, chance)
    together = Resharder(mesh, _price).seconds(shape, 4, sources, targets)
    monkeypatch.setattr(path, "_MOST_STATES", 0)
    assert np.array_equal(together, Resharder(mesh, _price).seconds(shape, 4, sources, targets))


def test_a_table_of_many_groups_makes_one_graph() -> None:
    mesh, shape = MeshShape.of({"a": 2, "b": 2}), (16, 64, 64)
    specs = _specs(shape, mesh, random.Random(0))
    resharder = Resharder(mesh, _price)
    resharder.seconds(shape, 4, specs, specs)
    assert len(resharder._graphs) == 1
