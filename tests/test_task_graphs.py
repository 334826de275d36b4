"""Models with the primitives of Whale, those of `examples/whale` among them: the numbers are one device's."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoshard
from autoshard.errors import HintError
from autoshard.tools.verify.float64 import default_float64
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, train

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "whale"


@contextlib.contextmanager
def examples() -> Iterator[None]:
    """Context in which the examples can be imported, and from which they are gone again."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in {path.stem for path in EXAMPLES.glob("*.py")} - before:
            sys.modules.pop(name, None)


def example(name: str) -> ModuleType:
    with examples():
        return importlib.import_module(name)


class Called(nn.Module):
    """A model that is called with its batch by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.model(first, second)


def assert_like_one_device(model: nn.Module, batch: tuple[Tensor, ...], mesh: dict[str, int]) -> nn.Module:
    """Train on all ranks of a mesh, and on one device."""
    module = Called(model)
    inputs = dict(zip(("first", "second"), batch, strict=True))
    alone = copy.deepcopy(module)
    reference = train(alone, inputs)
    with simulated_mesh(**mesh) as device_mesh, default_float64():
        search = autoshard.Search(effort="fast")
        autoshard.parallelize(module, device_mesh, (), inputs, cluster=fast_links(), search=search)
        trace = train(module, inputs)
    assert compare(trace, reference).worst < TOLERANCE
    return module


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of the examples with primitives for two devices, and a batch, in float64."""
    torch.manual_seed(0)
    with default_float64():
        return example(name).build(2)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("data_parallel", {"x": 2}),
        ("replicate_and_split", {"x": 2, "y": 2}),
        ("mixture_of_experts", {"x": 2}),
        ("mixture_of_experts", {"x": 2, "y": 2}),
    ],
)
def test_the_examples_train_as_on_one_device(name: str, mesh: dict[str, int]) -> None:
    placements = assert_like_one_device(*build(name), mesh).sharding_plan.placements
    if name == "replicate_and_split":
        assert placements["model.classes.weight"][-1].is_shard()
        assert all(value[0].is_replicate() for key, value in placements.items() if key.startswith("model.features"))
    if name == "mixture_of_experts":
        assert placements["model.up"][-1].is_shard()
        assert placements["model.down"][-1].is_shard()
        assert placements["model.first.weight"][0].is_replicate()


class Layer(nn.Module):
    """Attention on replicas, and a split feed-forward block, as Megatron's with sequences of batches between."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with autoshard.replicate():
            x = x + self.attention(x, x, x, need_weights=False)[0]
        with autoshard.split():
            return x + self.down(functional.gelu(self.up(self.norm(x))))


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Layer() for _ in range(count)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.layers(x), target)


def test_every_layer_has_its_task_graphs() -> None:
    with default_float64():
        model = Layers(2)
    placements = assert_like_one_device(model, (torch.randn(4, 6, 16).double(),) * 2, {"x": 2}).sharding_plan.placements
    for layer in ("model.layers.0", "model.layers.1"):
        assert placements[f"{layer}.attention.in_proj_weight"][0].is_replicate()
        assert placements[f"{layer}.up.weight"][0].is_shard(0)
        assert placements[f"{layer}.down.weight"][0].is_shard(1)


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "batch"}, "target": {0: "batch"}}])
def test_other_calls_keep_the_task_graphs(dynamic: dict[str, dict[int, str]] | None) -> None:
    with default_float64():
        model = Layers(1).eval()
    alone = copy.deepcopy(model)
    calls = [{"x": torch.randn(rows, 6, 16).double(), "target": torch.randn(rows, 6, 16).double()} for rows in (4, 8)]
    with simulated_mesh(x=2) as mesh:
        search = autoshard.Search(effort="fast")
        autoshard.parallelize(model, mesh, (), calls[0], cluster=fast_links(), search=search, dynamic=dynamic)
        for call in calls:
            with torch.no_grad():
                ours, theirs = model(**call), alone(**call)
            for value in per_rank(ours, mesh).values():
                torch.testing.assert_close(value, per_rank(theirs, mesh)[0,], rtol=TOLERANCE, atol=0.0)


def test_devices_that_the_mesh_has_not_change_nothing() -> None:
    model, batch = build("data_parallel")
    said = r"replicate\(2\) asks for 2 devices, and no axis of the mesh x=3"
    with simulated_mesh(x=3) as mesh, pytest.raises(HintError, match=said):
        autoshard.parallelize(model, mesh, batch)
    assert not hasattr(model, "sharding_plan")
