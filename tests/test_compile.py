"""`parallelize(..., compile=True)`: the same numbers and the same collectives as without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.cluster.cluster import Link
from tests import models
from tests.training import fast_links
from tests.workers import Workers

HINTS: dict[str, Any] = {"layers.*.mlp.*.weight": [Shard(0)], "head.weight": [Shard(1)]}
NAMESPACES = ("_c10d_functional", "autoshard")


@pytest.fixture
def mesh() -> DeviceMesh:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def _parallelized(mesh: DeviceMesh, compile: bool, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A GPT on a cluster so fast that every tensor of it is worth sharding."""
    model, kwargs = models.gpt(dtype=torch.float64, layers=1, dropout=0.2)
    preset, link = autoshard.Cluster.preset("cpu"), Link(bandwidth=1e12, latency=1e-9)
    cluster = replace(preset, inside=link, between=link, device=replace(preset.device, kernel_overhead=1e-9))
    options |= {"hints": HINTS, "cluster": cluster, "compile": compile}
    return autoshard.parallelize(model, mesh, (), kwargs, **options), kwargs


def _graphs(model: nn.Module) -> list[fx.Graph]:
    """The forward and the backward graph of the one program that a model has."""
    (served,) = model.__dict__["_autoshard_runtime"].programs.table.values()
    halves = served.program.halves
    return [getattr(half, "_orig_mod", half).graph for half in (halves.forward, halves.backward)]


def _communication(graph: fx.Graph) -> list[str]:
    """Names of collectives and of random operators, in order; not of waits, joins, and what seeds are made of."""
    targets = [str(node.target) for node in graph.nodes if getattr(node.target, "namespace", "") in NAMESPACES]
    return [target for target in targets if not any(name in target for name in ("wait_tensor", "key", "join"))]


def test_what_the_plan_recomputes_is_recomputed_in_the_halves_for_inductor(mesh: DeviceMesh) -> None:
    compiled, eager = (_graphs(_parallelized(mesh, compile, recompute="full")[0]) for compile in (True, False))
    for half, other in zip(compiled, eager, strict=True):
        assert Counter(_communication(half)) == Counter(_communication(other))
    draws = [_communication(half).count("autoshard.bernoulli.default") for half in compiled]
    assert draws[0] == 2
    assert draws[1] > 0


def test_nothing_is_repeated_in_the_halves_for_inductor(mesh: DeviceMesh) -> None:
    compiled, eager = (_graphs(_parallelized(mesh, compile)[0]) for compile in (True, False))
    for half, other in zip(compiled, eager, strict=True):
        assert Counter(_communication(half)) == Counter(_communication(other))
    assert Counter(target for graph in compiled for target in _communication(graph))["autoshard.bernoulli.default"] == 2
    kinds = {target.split(".")[1] for graph in compiled for target in _communication(graph)}
    assert kinds >= {"all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"}


def _step(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Tensor, list[Tensor], list[str]]:
    """Loss, local gradients, and the collectives of one step: when each is issued, and when awaited."""
    torch.manual_seed(3)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss = model(**kwargs)[1]
        loss.backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("_c10d_functional::") for event in events if "_c10d_functional" in event.name]
    issued = [name.rstrip("_").removesuffix("_out") for name in names]
    return loss.detach(), [parameter.grad.to_local() for parameter in model.parameters()], issued


def _compiled_equals_eager() -> None:
    """With `compile=True`, and within a model that `torch.compile` was asked for."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled, kwargs = _parallelized(mesh, compile=True)
    inside = _parallelized(mesh, compile=False)[0]
    eager = _parallelized(mesh, compile=False)[0]
    expected, others, issued_eagerly = _step(eager, kwargs)
    largest = max(other.abs().max() for other in others)
    for model in (compiled, torch.compile(inside)):
        _step(model, kwargs)  # inductor compiles
        loss, gradients, issued = _step(model, kwargs)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12 * float(largest))
        assert issued == issued_eagerly
        assert "wait_tensor" in issued
    programs = inside._autoshard_runtime.programs.table.values()  # type: ignore[union-attr]
    assert [served.program.compiled for served in programs] == [True]


@pytest.mark.slow
def test_inductor_gives_the_numbers_and_the_collectives_of_the_eager_program(two: Workers) -> None:
    two.run(_compiled_equals_eager)


def _compiled_equals_one_device(rows: Sequence[int], options: dict[str, Any]) -> None:
    """A step and an evaluation of a model in shares, where this rank is given so many of twelve samples.

    The model is a small one: what takes long is compiling, a few seconds for every kernel.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    (alone, kwargs), (model, _) = (models.mlp(dtype=torch.float64, batch=12) for _ in range(2))
    made_again = {name: value for name, value in options.items() if name in ("dynamic", "inputs")}
    plan = autoshard.plan(model, mesh, (), kwargs, cluster=fast_links(), **options)
    assert plan.shares
    autoshard.parallelize(model, mesh, (), kwargs, plan=plan, compile=True, **made_again)
    rank, end = mesh.get_local_rank(), sum(rows)
    own = {name: tensor.split(rows)[rank] if end == 12 else tensor for name, tensor in kwargs.items()}
    loss, expected = model(**own), alone(**kwargs)
    loss.backward(), expected.backward()
    for name, parameter in alone.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
    if end == 12:  # a compiled evaluation is compiled anew, which takes as long
        with torch.no_grad():
            model.eval(), alone.eval()
            torch.testing.assert_close(model(**own), alone(**kwargs), rtol=1e-9, atol=0)


@pytest.mark.slow
def test_inductor_computes_with_shares_of_the_batch(two: Workers) -> None:
    samples = {"x": {0: "batch"}, "target": {0: "batch"}}
    options = {"shares": {"axis": (2, 1)}, "dynamic": samples, "inputs": "local"}
    two.run(_compiled_equals_one_device, (8, 4), options)


@pytest.mark.slow
def test_inductor_computes_with_unequal_parts(two: Workers) -> None:
    options = {"shares": {"axis": (3, 1)}, "hints": {"": autoshard.split("axis")}}
    two.run(_compiled_equals_one_device, (12, 12), options)
