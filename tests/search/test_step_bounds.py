"""Bounds hold for what the planner predicts, whatever it was asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.errors import BudgetError
from autoshard.memory.optimizer import optimizer_memory
from autoshard.options.target import Settings
from autoshard.planner.planner import Planner
from autoshard.planner.planning import plan_with_recompute
from autoshard.planner.planning_problem import Constraints
from autoshard.search.shapes import Shape
from autoshard.search.step_bounds import LeastWork, least_bytes, tighten_bound
from autoshard.specs.axes import MeshShape
from tests import models
from tests.training import fast_links

_ROUNDING = 1 + 1e-9
OPTIMIZER = optimizer_memory("adamw", None, foreach=True)


def slow_links() -> Cluster:
    """Two devices to a host, and so little work on them that what is sent counts most."""
    cluster = Cluster.preset("cpu")
    link = dataclasses.replace(cluster.between, bandwidth=cluster.between.bandwidth / 20)
    return dataclasses.replace(cluster, devices_per_host=2, between=link)


FAST, SLOW = pytest.param(fast_links(), id="fast links"), pytest.param(slow_links(), id="slow links")


@pytest.mark.parametrize("cluster", [FAST, SLOW])
@pytest.mark.parametrize("name", ["mlp", "lstm", "dlrm"])
def test_no_plan_is_faster_or_leaner(name: str, cluster: Cluster) -> None:
    _check_bounds(name, {}, cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("hf_llama", {"layers": 1}), ("wide_resnet", {})])
def test_no_plan_of_a_larger_model_is_faster_or_leaner(name: str, options: dict[str, int]) -> None:
    _check_bounds(name, options, slow_links())


def _check_bounds(name: str, options: dict[str, int], cluster: Cluster) -> None:
    module, kwargs = models.ZOO[name](**options)
    graph = capture(module, (), kwargs)
    for sizes in ({"x": 4}, {"x": 3, "y": 2}):
        shape = Shape(MeshShape.of(sizes))
        quick = Planner(graph, shape.mesh, cluster, Constraints(), Settings(optimizer=OPTIMIZER, effort="fast"))
        plans = [
            plan_with_recompute(quick),
            plan_with_recompute(Planner(graph, shape.mesh, cluster, Constraints(), Settings(optimizer=OPTIMIZER))),
        ]
        least = LeastWork(quick.rules, quick.cost).seconds(shape)
        assert quick.unlimited is not None
        links = len({quick.cost.spans_hosts(axis) for axis in range(shape.mesh.ndim)})
        tight = tighten_bound(least, quick.unlimited, links, cluster.contention)
        held = least_bytes(graph, shape, OPTIMIZER)
        assert 0 < least <= tight
        for plan in plans:
            assert tight <= plan.step_seconds * _ROUNDING
            assert 0 < held <= plan.memory.peak


def test_no_plan_within_a_limit_is_faster_or_leaner() -> None:
    module, kwargs = models.ALL["mlp"]()
    graph = capture(module, (), kwargs)
    shape, cluster = Shape(MeshShape.of({"x": 2, "y": 2})), slow_links()
    free = Planner(graph, shape.mesh, cluster, Constraints(), Settings(optimizer=OPTIMIZER))
    whole = plan_with_recompute(free)
    least, held = LeastWork(free.rules, free.cost).seconds(shape), least_bytes(graph, shape, OPTIMIZER)
    with pytest.raises(BudgetError) as shortfall:
        plan_with_recompute(
            Planner(graph, shape.mesh, cluster, Constraints(), Settings(memory_limit=held, optimizer=OPTIMIZER))
        )
    assert shortfall.value.peak is not None
    assert held < shortfall.value.peak < whole.memory.peak
    limit = Settings(memory_limit=shortfall.value.peak, optimizer=OPTIMIZER)
    lean = plan_with_recompute(Planner(graph, shape.mesh, cluster, Constraints(), limit))
    assert free.unlimited is not None
    assert tighten_bound(least, free.unlimited, 2, cluster.contention) <= lean.step_seconds * _ROUNDING


def test_more_devices_never_have_a_larger_bound() -> None:
    module, kwargs = models.ALL["mlp"]()
    graph = capture(module, (), kwargs)
    planner = Planner(graph, MeshShape.of({"x": 2}), fast_links(), Constraints(), Settings())
    work = LeastWork(planner.rules, planner.cost)
    shapes = [Shape(MeshShape.of({"x": devices})) for devices in (1, 2, 4, 8)]
    seconds = [work.seconds(shape) for shape in shapes]
    held = [least_bytes(graph, shape, OPTIMIZER) for shape in shapes]
    assert seconds == sorted(seconds, reverse=True)
    assert held == sorted(held, reverse=True)
    assert seconds[0] > 2 * seconds[-1]
    assert held[0] > 4 * held[-1]


def test_a_pipeline_is_bound_by_its_busiest_rank_and_by_one_microbatch() -> None:
    """Launches cost nothing here, so that work divides without a rest."""
    module, kwargs = models.ALL["mlp"]()
    graph = capture(module, (), kwargs)
    cluster = fast_links()
    device = dataclasses.replace(cluster.device, kernel_overhead=0.0)
    planner = Planner(
        graph, MeshShape.of({"x": 1}), dataclasses.replace(cluster, device=device), Constraints(), Settings()
    )
    work = LeastWork(planner.rules, planner.cost)
    alone = work.seconds(Shape(MeshShape.of({"pp": 1}), "pp"))
    four = Shape(MeshShape.of({"pp": 4}), "pp")
    assert work.seconds(four, [8]) == pytest.approx(alone / 4)
    assert work.seconds(four, [2]) == pytest.approx(alone / 2)
    assert work.seconds(four, [1, 2, 8]) == pytest.approx(alone / 4)
    assert work.seconds(Shape(MeshShape.of({"pp": 4, "x": 2}), "pp"), [8]) == pytest.approx(alone / 8)


def test_stages_share_parameters_and_what_is_trained_of_them() -> None:
    module = torch.nn.Linear(64, 32, bias=False)
    graph = capture(module, (torch.zeros(2, 64),), {})
    pipeline = Shape(MeshShape.of({"pp": 2, "x": 2}), "pp")
    parameter = 64 * 32 * 4
    assert least_bytes(graph, pipeline, optimizer_memory("sgd", None, foreach=False)) == 2 * parameter // 4
    assert least_bytes(graph, pipeline, optimizer_memory("momentum", None, foreach=False)) == 3 * parameter // 4
    module.requires_grad_(False)
    frozen = capture(module, (torch.zeros(2, 64),), {})
    assert least_bytes(frozen, pipeline, optimizer_memory("momentum", None, foreach=False)) == parameter // 4
