"""Steps that keep, gather again and recompute: one device's numbers, the same draws, and less memory."""

from __future__ import annotations

import copy
import weakref
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests import models
from tests.random_plans import random_plan
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import (
    ONE_LAYER,
    TOLERANCE,
    build,
    captured_as,
    compare,
    fast_links,
    joint_graph,
    one_device,
    train,
    train_random_plan,
)
from tests.workers import Workers

SOME: dict[str, Any] = {"forced": 0.5, "recompute": 0.6}
ALL: dict[str, Any] = {"forced": 0.5, "recompute": 1.0}
UNEVEN: dict[str, Any] = {"uneven": 0.5, "recompute": 0.6}
OPERATORS: dict[str, Any] = {"forced": 0.5, "rerun": 0.5}

FAST = [
    ("mlp", (2,), 0, ALL),
    ("mlp", (2, 2), 1, SOME),
    ("mlp", (5,), 2, UNEVEN),
    (ONE_LAYER, (2,), 3, ALL),
    (ONE_LAYER, (2, 2), 5, SOME),
    ("mlp", (3,), 6, OPERATORS),
    (ONE_LAYER, (2, 2), 7, OPERATORS),
    (ONE_LAYER, (3,), 12, {"uneven": 0.5, "rerun": 0.3}),
]
SLOW = [
    ("wide_resnet", (2,), 8, ALL),
    ("hf_mixtral", (2,), 9, ALL),
    ("lstm", (2,), 11, ALL),
    ("hf_mixtral", (2,), 13, OPERATORS),
    ("resnet18", (2,), 14, OPERATORS),
]
CASES = [*(pytest.param(*case) for case in FAST), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def _mesh(sizes: tuple[int, ...]) -> dict[str, int]:
    return {f"axis{place}": size for place, size in enumerate(sizes)}


@pytest.mark.parametrize(("model", "mesh", "seed", "options"), CASES)
def test_random_plans_that_gather_again_and_recompute_equal_one_device(
    model: str, mesh: tuple[int, ...], seed: int, options: dict[str, Any]
) -> None:
    trace = train_random_plan(model, _mesh(mesh), seed, **options)
    assert compare(trace, one_device(model, len(trace.losses))).worst <= TOLERANCE


@pytest.mark.parametrize(("recompute", "limit"), [("none", 1_200_000), ("auto", 1_120_000), ("full", None)])
def test_planned_steps_equal_one_device(recompute: str, limit: int | None) -> None:
    module, inputs = build(ONE_LAYER)
    with simulated_mesh(x=2) as mesh:
        options: dict[str, Any] = {"cluster": fast_links(), "memory_limit": limit, "recompute": recompute}
        with captured_as(joint_graph(ONE_LAYER)):
            autoshard.parallelize(module, mesh, (), inputs, search=autoshard.Search(effort="fast"), **options)
        trace = train(module, inputs)
    assert compare(trace, one_device(ONE_LAYER)).worst <= TOLERANCE
    assert bool(module.sharding_plan.recomputed) == (recompute != "none")


class Checkpointed(nn.Module):
    """Layers that run in checkpoints, but for one in which a region is kept, and another region runs again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(3))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        with autoshard.recompute():
            hidden = self.layers[2][0](x).sin().exp()
            with autoshard.keep():
                hidden = hidden.sigmoid()
            x = x + self.layers[2][2](hidden.cos())
        return torch.nn.functional.mse_loss(x, target)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recompute": "none"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"hints": {"layers.*.1": autoshard.keep()}},
    ],
    ids=str,
)
def test_regions_of_the_code_equal_one_device(reentrant: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Checkpointed(reentrant).double()
    inputs = {name: torch.randn(8, 12, dtype=torch.float64) for name in ("x", "target")}
    inputs["x"].requires_grad_()
    alone = train(copy.deepcopy(module), inputs)
    with simulated_mesh(x=2, y=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), **options)
        trace = train(module, inputs)
    assert compare(trace, alone).worst <= TOLERANCE
    again = set(module.sharding_plan.recomputed)
    operators = {one.node: one.operator for one in module.sharding_plan.choices}
    assert {"aten.sin", "aten.cos"} <= {operators[name].rpartition(".default")[0] or operators[name] for name in again}
    assert not any("sigmoid" in operators[name] for name in again)


def _train_in_another_process(file: str) -> float:
    """On a real process: the largest difference to one device of training under a plan that was saved."""
    module, inputs = build(ONE_LAYER)
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("axis0",))
    plan = ShardingPlan.load(file)
    autoshard.parallelize(module, mesh, (), inputs, plan=plan)
    assert module.sharding_plan.recomputed == plan.recomputed
    return compare(train(module, inputs), one_device(ONE_LAYER)).worst


def test_a_plan_with_hints_runs_where_there_are_none(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    module, inputs = build(ONE_LAYER)
    # A region of the whole model has operators outside of layers, and results that leave layers.
    hints = {"": autoshard.recompute(), "*.attention": autoshard.keep()}
    plan = autoshard.plan(module, {"axis0": 2}, (), inputs, hints=hints, cluster=fast_links())
    plan.save(file)
    paths = {one.module for one in plan.choices if one.node in set(plan.recomputed) and one.seconds}
    assert any("layers" not in path for path in paths)
    assert not any("attention" in path for path in paths)
    with Workers(2) as workers:
        assert max(workers.run(_train_in_another_process, str(file))) <= TOLERANCE


# Draws


class Dropped(nn.Module):
    """Layers whose loss is linear in a weight behind their dropout, so that it tells which elements were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.weight = nn.Parameter(torch.rand(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up in self.ups:
            x = torch.nn.functional.dropout(up(x).tanh().exp(), 0.5).sin()
        return (x * self.weight).mean()


def _loss_and_slope(plan: ShardingPlan | None, **options: Any) -> tuple[list[float], list[float]]:
    """On every rank, the loss of a step, and what the gradient of the weight says that it is."""
    torch.manual_seed(0)
    module = Dropped().double()
    weight = module.weight.detach().clone()
    x = torch.randn(12, 24, dtype=torch.float64)
    with simulated_mesh(x=2, y=2) as mesh:
        autoshard.parallelize(module, mesh, (x,), plan=plan, **options)
        loss = module(x)
        loss.backward()
        slope = module.weight.grad.full_tensor() @ weight  # type: ignore[union-attr]
        return [[float(one) for one in per_rank(value.detach(), mesh).values()] for value in (loss, slope)]  # type: ignore[return-value]


def test_what_is_drawn_again_are_the_same_numbers() -> None:
    graph = capture(Dropped().double(), (torch.randn(12, 24, dtype=torch.float64),), {})
    mesh = MeshShape.of({"x": 2, "y": 2})
    plans = [random_plan(graph, mesh, seed, recompute=1.0) for seed in range(2)]
    plans += [random_plan(graph, mesh, seed, rerun=0.7) for seed in range(2, 5)]
    drawn = 0
    for plan in plans:
        with captured_as(graph):
            losses, slopes = _loss_and_slope(plan)
        assert losses == pytest.approx(slopes, rel=1e-12)
        assert len(set(losses)) == 1
        drawn += sum("native_dropout" in name and "again" in name for name in plan.decisions["choices"])
    assert drawn
    hints = {"": autoshard.recompute(), "ups.1": autoshard.keep()}
    for options in ({"recompute": "full"}, {"recompute": "selective"}, {"hints": hints}):
        losses, slopes = _loss_and_slope(None, cluster=fast_links(), **options)
        assert losses == pytest.approx(slopes, rel=1e-12)


# Memory


class LiveBytes(TorchDispatchMode):
    """While active, counts the bytes of what operators make until it is freed; memory that is shared counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.live:
                    freed = partial(self._free, storage._cdata, storage.nbytes())
                    self.live[storage._cdata] = weakref.ref(storage, freed)
                    self.held += storage.nbytes()
        self.peak = max(self.peak, self.held)
        return result

    def _free(self, key: int, size: int, _: object) -> None:
        del self.live[key]
        self.held -= size


@cache
def _deep_graph() -> JointGraph:
    module, inputs = models.gpt(layers=6, batch=48)
    return capture(module, (), inputs)


def _peak(sizes: dict[str, int], **options: Any) -> tuple[int, ShardingPlan]:
    """The most that a forward and backward pass makes and holds at once on the first of the ranks, and the plan."""
    mesh_shape = MeshShape.of(sizes)
    dist.init_process_group("fake", rank=0, world_size=mesh_shape.size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", mesh_shape.sizes, mesh_dim_names=mesh_shape.names)
        module, inputs = models.gpt(layers=6, batch=48)
        with captured_as(_deep_graph()):
            autoshard.parallelize(
                module, mesh, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast"), **options
            )
        module(**inputs)[1].backward()
        module.zero_grad()
        with LiveBytes() as live:
            module(**inputs)[1].backward()
        return live.peak, module.sharding_plan
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [{"x": 1}, {"x": 2}], ids=str)
def test_recomputation_holds_less(sizes: dict[str, int]) -> None:
    whole, kept = _peak(sizes, recompute="none")
    less, again = _peak(sizes, recompute="full")
    assert len(again.recomputed) == 6
    assert not kept.recomputed
    assert less < 0.6 * whole
    assert again.memory.peak < kept.memory.peak
    message, found_result = kept.memory.peak - again.memory.peak, whole - less
    assert found_result == pytest.approx(message, rel=0.25)
