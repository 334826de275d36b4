"""Sizes that no axis divides: whole models against one device, planned and under random plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.patterns.graph_rules import GraphRules
from autoshard.patterns.strategy import resolve_variant, uneven_axis
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import is_shard, placement_text
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from tests.models.basic import Block, Mlp
from tests.models.common import Model, fixed_seed
from tests.random_plans import random_plan
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import OF_ONE_LAYER, TOLERANCE, Trace, build, captured_as, compare, fast_links, train
from tests.workers import Workers

Make = Callable[[], Model]


class TinyGpt(nn.Module):
    """One transformer layer between an embedding and a cross-entropy."""

    def __init__(self, vocabulary: int, sequence: int, heads: int, size: int) -> None:
        super().__init__()
        hidden = heads * size
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.layer = Block(hidden, heads, "view", 0.0)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.layer(x)))
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(vocabulary: int = 61, batch: int = 6, sequence: int = 7, heads: int = 3, size: int = 4) -> Model:
    with fixed_seed(torch.float64, 0):
        ids, labels = (torch.randint(0, vocabulary, (batch, sequence)) for _ in range(2))
        labels[0, :2] = -100
        return TinyGpt(vocabulary, sequence, heads, size), {"ids": ids, "labels": labels}


def mlp(hidden: int = 12, inner: int = 16, batch: int = 4) -> Model:
    with fixed_seed(torch.float64, 0):
        x, target = torch.randn(batch, hidden), torch.randn(batch, hidden)
        return Mlp(hidden, inner), {"x": x, "target": target}


class TinyCnn(nn.Module):
    """Convolutions and the norms that share statistics of a batch, of a group, or of none."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels)
        self.groups = nn.GroupNorm(channels, channels)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = functional.relu(self.norm(self.stem(images)))
        x = self.pool(x + self.groups(functional.interpolate(self.depthwise(x), scale_factor=2.0)))
        logits = self.head(x.mean((2, 3)))
        return logits, functional.cross_entropy(logits, labels, label_smoothing=0.1)


def cnn(channels: int = 5, batch: int = 3, classes: int = 7) -> Model:
    with fixed_seed(torch.float64, 0):
        images, labels = torch.randn(batch, 3, 8, 8), torch.randint(0, classes, (batch,))
        return TinyCnn(channels, classes), {"images": images, "labels": labels}


def axes(sizes: tuple[int, ...]) -> dict[str, int]:
    return {f"axis{place}": size for place, size in enumerate(sizes)}


def llama() -> Model:
    """Six query heads that share two heads of keys and values."""
    return build("hf_llama" + OF_ONE_LAYER)


def resnet() -> Model:
    return build("wide_resnet", batch=3)


@functools.cache
def on_one_device(make: Make, steps: int) -> Trace:
    module, inputs = make()
    with Float64Mode():
        return train(module, inputs, steps)


def parallel(make: Make, mesh: Mapping[str, int], steps: int, **options: Any) -> Trace:
    with simulated_mesh(**mesh) as device_mesh:
        return on_device_mesh(make, device_mesh, steps, **options)


def on_device_mesh(make: Make, device_mesh: DeviceMesh, steps: int, **options: Any) -> Trace:
    module, inputs = make()
    with Float64Mode():
        autoshard.parallelize(
            module, device_mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"), **options
        )
    with default_float64():
        return train(module, inputs, steps)


def at_random(make: Make, sizes: tuple[int, ...], seed: int, **options: Any) -> Trace:
    """One step under a random plan, some operators of which run on padded shards."""
    outputs = "planned" if options.get("planned_outputs") else None
    plan = autoshard.ShardingPlan.from_json(uneven_plan(make, sizes, seed, **options).to_json())
    with captured_as(captured(make)):
        return parallel(make, axes(sizes), 1, plan=plan, output_placements=outputs)


@functools.cache
def captured(make: Make) -> JointGraph:
    module, inputs = make()
    with Float64Mode():
        return capture(module, (), inputs)


def uneven_plan(make: Make, sizes: tuple[int, ...], seed: int, **options: Any) -> autoshard.ShardingPlan:
    graph = captured(make)
    mesh = MeshShape.of(axes(sizes))
    plan = random_plan(graph, mesh, seed, **options)
    assert uneven_operators(graph, plan, mesh)
    return plan


def uneven_operators(graph: JointGraph, plan: autoshard.ShardingPlan, mesh: MeshShape) -> list[str]:
    """The operators that a plan runs on padded shards."""
    flow = Flow(GraphRules(graph, mesh), Decisions.from_data(plan.decisions), mesh)
    result = []
    for node in flow.rules.operators:
        rule, choices = resolve_variant(flow.rules.rules[node], flow.decisions.choices[node.name])
        if any(choice >= 0 and uneven_axis(rule, choices, mesh, choice) is not None for choice in choices):
            result.append(node.name)
    return result


@pytest.mark.parametrize(
    ("make", "sizes", "seeds"),
    [
        (gpt, (4,), 1),
        (gpt, (2, 2), 1),
        (mlp, (5,), 2),
        (mlp, (7,), 2),
        (mlp, (3, 5), 1),
        (cnn, (4,), 1),
        (cnn, (2, 2), 1),
    ],
)
def test_random_plans_equal_one_device(make: Make, sizes: tuple[int, ...], seeds: int) -> None:
    reference = on_one_device(make, 1)
    for seed in range(seeds):
        assert compare(at_random(make, sizes, seed, forced=0.3), reference).worst <= TOLERANCE, seed


@pytest.mark.slow
@pytest.mark.parametrize(("make", "sizes"), [(llama, (3,)), (resnet, (2,))])
def test_larger_models_under_random_plans(make: Make, sizes: tuple[int, ...]) -> None:
    reference = on_one_device(make, 1)
    assert compare(at_random(make, sizes, 0, forced=0.3), reference).worst <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "sizes", "sharded"),
    [
        (mlp, (5,), {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}),
        (mlp, (7,), {"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}),
        (functools.partial(gpt, 253, batch=1, size=3), (4,), {"head.weight": "S(0)", "tokens.weight": "S(0)"}),
        (functools.partial(cnn, batch=1), (2,), {"head.weight": "S(0)"}),
    ],
)
def test_planned_models_equal_one_device(make: Make, sizes: tuple[int, ...], sharded: dict[str, str]) -> None:
    """Inner dims, vocabularies and classes that no axis divides are sharded all the same, at rest too."""
    with captured_as(captured(make)):
        trace = parallel(make, axes(sizes), 2)
    assert compare(trace, on_one_device(make, 2)).worst <= TOLERANCE
    assert {name: placement_text(trace.placements[name][0]) for name in sharded} == sharded


@pytest.mark.slow
@pytest.mark.parametrize(("make", "sizes"), [(llama, (3,)), (cnn, (7,))])
def test_larger_models_as_planned(make: Make, sizes: tuple[int, ...]) -> None:
    with captured_as(captured(make)):
        trace = parallel(make, axes(sizes), 1)
    assert compare(trace, on_one_device(make, 1)).worst <= TOLERANCE


def test_outputs_left_as_planned_have_no_padding() -> None:
    """Six samples on four devices: two, two, two and none, or whatever the plan splits."""
    plan = uneven_plan(gpt, (4,), 1, planned_outputs=True)
    assert any(is_shard(placement) for placement in plan.output_placements["output[0]"])
    assert compare(at_random(gpt, (4,), 1, planned_outputs=True), on_one_device(gpt, 1)).worst <= TOLERANCE


@pytest.mark.parametrize(("vocabulary", "devices"), [(61, 8), (101, 4)])
def test_a_vocabulary_that_no_axis_divides_is_sharded_from_the_table_to_the_logits(
    vocabulary: int, devices: int
) -> None:
    make = functools.partial(gpt, vocabulary)
    hints = {"tokens.weight": Shard(0), "head.weight": Shard(0)}
    module, inputs = make()
    with simulated_mesh(axis0=devices) as device_mesh:
        autoshard.parallelize(
            *(module, device_mesh, (), inputs),
            cluster=fast_links(),
            search=autoshard.Search(effort="fast"),
            hints=hints,
            output_placements={"output[0]": Shard(2)},
        )
        trace = train(module, inputs, 2)
        logits, _ = module(**inputs)
    assert compare(trace, on_one_device(make, 2)).worst <= TOLERANCE
    assert logits.placements == (Shard(2),)
    words = [
        min(max(vocabulary - rank * -(-vocabulary // devices), 0), -(-vocabulary // devices)) for rank in range(devices)
    ]
    assert [local.shape[2] for local in per_rank(logits, device_mesh).values()] == words


class Pinned(nn.Module):
    """Two linear layers, what passes between them pinned along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(autoshard.shard(self.up(x).tanh(), Shard(0)))


def pinned(batch: int) -> Model:
    with fixed_seed(torch.float64, 0):
        return Pinned(), {"x": torch.randn(batch, 6)}


@pytest.mark.parametrize("batch", [3, 5, 6])
def test_activations_pinned_along_a_batch_that_does_not_divide(batch: int) -> None:
    """A rank may have none of the samples."""
    make = functools.partial(pinned, batch)
    outputs = {"output_placements": {"output": Shard(0)}}
    assert compare(parallel(make, {"x": 4}, 2, **outputs), on_one_device(make, 2)).worst <= TOLERANCE


def test_an_output_that_no_tensor_of_torch_can_be_is_refused() -> None:
    module, inputs = pinned(6)
    wanted = {"output": (Shard(0), Shard(0))}
    with pytest.raises(autoshard.HintError, match="does not divide dim 0"):
        autoshard.plan(module, {"x": 2, "y": 2}, (), inputs, output_placements=wanted)


@settings(max_examples=5)
@given(
    st.integers(2, 9), st.integers(2, 11), st.integers(1, 7), st.sampled_from([(2,), (3,), (4,), (5,), (2, 3), (3, 2)])
)
def test_any_sizes_on_any_mesh(hidden: int, inner: int, batch: int, sizes: tuple[int, ...]) -> None:
    """Dims smaller than an axis too: nothing crashes, and nothing changes the numbers."""
    make = functools.partial(mlp, hidden, inner, batch)
    reference = on_one_device(make, 1)
    assert compare(parallel(make, axes(sizes), 1), reference).worst <= TOLERANCE


def test_two_processes_equal_one_device() -> None:
    with Workers(2) as workers:
        assert max(workers.run(worst_of_two_processes)) <= TOLERANCE


def worst_of_two_processes() -> float:
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis0",))
    reference = on_one_device(gpt, 1)
    plan = uneven_plan(gpt, (2,), 0, forced=0.3)
    return compare(on_device_mesh(gpt, device_mesh, 1, plan=plan), reference).worst
