"""The torch.compile backend: the same as parallelize from the first call on, or an error that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from tests import models
from tests.models.gradients import Reverse, Round
from tests.workers import Workers


class Twins(nn.Module):
    """Two results of one shape and dtype, and one that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(24, 24)
        self.right = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.norm(x)
        return {"right": self.right(h), "left": self.left(h), "x": x}


class Functions(nn.Module):
    """Two results of one shape and dtype, of functions with their own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = Reverse.apply(self.layer(x), 0.5)
        return Round.apply(h), h * 2


class Broken(nn.Module):
    """A module that Dynamo can't take as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(24, 24)
        self.two = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        torch._dynamo.graph_break()
        return self.two(h)


class Outer(nn.Module):
    """A module whose own graph is empty before the break, and whose part is one whole graph."""

    def __init__(self) -> None:
        super().__init__()
        self.part = models.Mlp(24, 48)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.part(x)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone: all of the machinery, and no communication."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    torch._dynamo.reset()


def _compiled(model: nn.Module, mesh: Any, **options: Any) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model, backend="autoshard", options={"mesh": mesh, **options})
    return compiled


def _scalar(result: Any) -> Tensor:
    tensors = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
    return torch.stack([tensor.square().mean() for tensor in tensors if tensor is not None]).sum()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _trains_alike(model: nn.Module, wrap: Callable[[nn.Module], Any], *calls: dict[str, Any], early: bool) -> None:
    """Steps, one per call, then evaluation, of the model and of its compiled form, whose optimizer is early or late."""
    alone, call = copy.deepcopy(model), wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if early else None
    expected = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for kwargs in (*calls, calls[0]):
        want, got = _scalar(alone(**kwargs)), _scalar(call(**kwargs))
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        for one, loss in ((expected, want), (optimizer, got)):
            one.zero_grad()
            loss.backward()
            one.step()
    for tensor, other in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(_whole(tensor), other, rtol=1e-9, atol=1e-12)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.eval(), alone.eval()
    with torch.no_grad():
        torch.testing.assert_close(_scalar(call(**calls[0])), _scalar(alone(**calls[0])), rtol=1e-9, atol=0)


def _twins() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Twins().double(), {"x": torch.randn(12, 24, dtype=torch.float64)}


def _sequential() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)).double()
    return model, {"input": torch.randn(12, 24, dtype=torch.float64)}


def _functions() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Functions().double(), {"x": torch.randn(12, 24, dtype=torch.float64)}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("build", [_sequential, _twins, _functions, lambda: models.mlp(dtype=torch.float64)])
def test_trains_as_one_device(mesh: DeviceMesh, build: Callable[[], models.Model], early: bool) -> None:
    model, kwargs = build()
    half = {name: value[:6] for name, value in kwargs.items()}
    _trains_alike(model, lambda model: _compiled(model, mesh), kwargs, half, early=early)


@pytest.mark.parametrize("build", [_sequential, lambda: models.mlp(dtype=torch.float64)])
def test_fullgraph(mesh: DeviceMesh, build: Callable[[], models.Model]) -> None:
    def full(model: nn.Module) -> Any:
        return torch.compile(model, backend="autoshard", fullgraph=True, options={"mesh": mesh})

    model, kwargs = build()
    _trains_alike(model, full, kwargs, early=False)


def test_compile_in_place(mesh: DeviceMesh) -> None:
    def in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="autoshard", fullgraph=True, options={"mesh": mesh})
        return model

    model, kwargs = models.mlp(dtype=torch.float64)
    _trains_alike(model, in_place, kwargs, early=False)


def test_hugging_face_output_class(mesh: DeviceMesh) -> None:
    model, kwargs = models.hf_llama()
    expected = model(**kwargs)
    result = _compiled(model, mesh)(**kwargs)
    assert type(result) is type(expected)
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(result.logits, expected.logits)


@pytest.mark.parametrize("build", [_sequential, models.mlp])
def test_hooks_that_compute(mesh: DeviceMesh, build: Callable[[], models.Model]) -> None:
    model, kwargs = build()
    x = next(iter(kwargs.values()))
    expected = model(x)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].sum()))
    model.register_forward_hook(lambda module, args, output: seen.append(output.sum()))
    compiled = _compiled(model, mesh)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(seen[-1], expected.sum())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_second_model_of_the_class_is_placed_too(mesh: DeviceMesh) -> None:
    for seed in (0, 1):
        model, kwargs = models.mlp(dtype=torch.float64, seed=seed)
        _trains_alike(model, lambda model: _compiled(model, mesh), kwargs, early=False)


def test_options_reach_the_planner(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()
    _compiled(
        model, mesh, hints={"up.weight": [torch.distributed.tensor.Shard(1)]}, search=autoshard.Search(method="ilp")
    )(**kwargs)
    assert list(model.sharding_plan.hints) == ["up.weight"]
    assert model.sharding_plan.options["method"] == "ilp"


def test_mesh_of_the_context(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()
    compiled = torch.compile(model, backend="autoshard")
    with autoshard.use_mesh(mesh):
        loss = compiled(**kwargs)
    torch.testing.assert_close(compiled(**kwargs), loss)
    assert model.up.weight.device_mesh == mesh


def test_without_a_mesh(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()
    with pytest.raises(autoshard.MeshError, match=r"options=\{\"mesh\": mesh\}.*use_mesh"):
        torch.compile(model, backend="autoshard")(**kwargs)
    assert not isinstance(model.up.weight, DTensor)


def test_unknown_options_and_modes(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()
    with pytest.raises(autoshard.PlanError, match=r"no option 'hint'.*hints.*It knows mesh, hints, memory_limit"):
        _compiled(model, mesh, hint={})(**kwargs)
    with pytest.raises(autoshard.PlanError, match="no option 'mode'"):
        torch.compile(model, backend="autoshard", mode="max-autotune")(**kwargs)
    assert not isinstance(model.up.weight, DTensor)


@pytest.mark.parametrize("build", [Broken, Outer])
def test_graph_breaks_are_refused(mesh: DeviceMesh, build: Callable[[], nn.Module]) -> None:
    model = build()
    for _ in range(2):
        with pytest.raises(autoshard.CaptureError, match=r"call autoshard.parallelize\(module, mesh\)"):
            _compiled(model, mesh)(torch.randn(12, 24))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_the_message_tells_where_the_graph_breaks(mesh: DeviceMesh) -> None:
    with pytest.raises(autoshard.CaptureError, match=r"test_compile_backend.py:\d+, in forward"):
        _compiled(Broken(), mesh)(torch.randn(12, 24))


def test_functions_around_a_module_are_refused(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()

    @torch.compile(backend="autoshard", options={"mesh": mesh})
    def step() -> Tensor:
        return model(**kwargs) * 2

    with pytest.raises(autoshard.CaptureError, match="Compile the module itself"):
        step()
    assert not isinstance(model.up.weight, DTensor)


def test_optimizer_with_state_for_old_parameters(mesh: DeviceMesh) -> None:
    model, kwargs = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**kwargs).backward()
    optimizer.step()
    _compiled(model, mesh)(**kwargs).backward()
    with pytest.raises(autoshard.PlanError, match="SGD holds state for a parameter of shape"):
        optimizer.step()


def test_local_inputs_need_results_that_can_be_told_apart(mesh: DeviceMesh) -> None:
    model, kwargs = _twins()
    with pytest.raises(autoshard.CaptureError, match="results of Twins can't be told apart"):
        _compiled(model, mesh, inputs="local")(**kwargs)


def _on_two_processes() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for build, early in ((_sequential, True), (_twins, False), (lambda: models.mlp(dtype=torch.float64), True)):
        model, kwargs = build()
        half = {name: value[:6] for name, value in kwargs.items()}
        _trains_alike(model, lambda model: _compiled(model, mesh), kwargs, half, early=early)
    model, kwargs = models.mlp()
    planned, _ = models.mlp()
    _compiled(model, mesh)(**kwargs)
    autoshard.parallelize(planned, mesh, (), kwargs)
    assert model.sharding_plan.placements == planned.sharding_plan.placements
    model, kwargs = models.mlp(dtype=torch.float64)
    expected = model(**kwargs)
    rows = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    shard = {name: [torch.distributed.tensor.Shard(0)] for name in kwargs}
    local = _compiled(model, mesh, inputs="local", input_placements=shard)
    for _ in range(2):
        loss = local(**{name: value[rows] for name, value in kwargs.items()})
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_two_processes() -> None:
    with Workers(2) as workers:
        workers.run(_on_two_processes)
