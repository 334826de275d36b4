"""Optimizers with state on the host: they train as one device does, and checkpoints know no difference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD, AdamW, Optimizer

import autoshard
from autoshard.capture import host_copies
from autoshard.errors import InputError
from autoshard.runtime import host_states
from tests.memory_tracker import first_rank
from tests.runtime.meshes import get_full, simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

HINTS = {"up.*": _StridedShard(0, split_factor=2), "down.weight": Shard(1), "cube": Shard(2)}


class Net(nn.Module):
    """With strided shards, unequal ones, and a parameter of no dims."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)
        self.cube = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).sin()) @ self.cube * self.scale).square().mean()


def batch(step: int = 0) -> Tensor:
    # No random numbers: a mesh of one process draws others for each rank.
    return (1 + torch.arange(16, dtype=torch.float64)).mul(1.7 + step).sin().view(4, 4)


def parallelized(mesh: DeviceMesh, offload_optimizer: Any = "all", **options: Any) -> Net:
    options = {"hints": HINTS, "cluster": fast_links()} | options
    return autoshard.parallelize(Net(), mesh, (batch(),), offload_optimizer=offload_optimizer, **options)


def train(module: nn.Module, optimizer: Optimizer, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        module(batch(step)).backward()
        optimizer.step()


def check_equal(module: nn.Module, alone: nn.Module) -> None:
    for name, expected in alone.named_parameters():
        torch.testing.assert_close(get_full(module, name), expected.detach(), rtol=1e-9, atol=1e-12)


def make(kind: type[Optimizer], module: nn.Module, given: Mapping[str, Any]) -> Optimizer:
    """Make an optimizer with two groups, of different rates."""
    weights, others = [], []
    for parameter in module.parameters():
        (weights if parameter.ndim == 2 else others).append(parameter)
    return kind([{"params": weights, "lr": 0.02}, {"params": others}], lr=0.01, **given)


CASES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.9, "foreach": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"foreach": True, "amsgrad": True}),
    (AdamW, {"fused": True}),
    *((kind, {}) for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad)),
    *((kind, {}) for kind in (torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop)),
]


def optimizers_train_as_one_device() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module, alone = parallelized(mesh), Net()
    assert set(module.sharding_plan.hosted) == dict(alone.named_parameters()).keys()
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    for kind, given in CASES:
        for net in (module, alone):
            net.load_state_dict(state)
            optimizer = make(kind, net, given)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            for step in range(3):
                train(net, optimizer, 1, step)
                scheduler.step()
        check_equal(module, alone)


def test_every_elementwise_optimizer_trains_as_one_device() -> None:
    with Workers(2) as workers:
        workers.run(optimizers_train_as_one_device)


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_on_a_mesh_of_two_axes(kind: type[Optimizer]) -> None:
    alone = Net()
    train(alone, kind(alone.parameters(), lr=0.01))
    with simulated_mesh(a=2, b=2) as mesh:
        module = parallelized(mesh, hints={"up.weight": {"a": Shard(0)}, "down.*": {"b": Shard(0)}})
        train(module, kind(module.parameters(), lr=0.01))
        check_equal(module, alone)


class Recorded(AdamW):
    """Notes what each of its steps updates, and calls a step that has hooks, as derived classes do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[list[Tensor]] = []
        self.fails = False

    def step(self, closure: Any = None) -> Any:
        self.seen.append([each for group in self.param_groups for each in group["params"]])
        if self.fails:
            raise ValueError("out of order")
        return super().step(closure)


def with_hosted(plan: autoshard.ShardingPlan, *names: str) -> autoshard.ShardingPlan:
    """Return the plan with the state of these parameters on the host."""
    nodes = dict(zip(plan.hosted, plan.decisions["hosted"], strict=True))
    return replace(plan, hosted=names, decisions={**plan.decisions, "hosted": [nodes[name] for name in names]})


def test_a_step_updates_some_on_the_device_and_the_others_one_by_one_on_the_host() -> None:
    mesh, module = {"tp": 2}, Net()
    everything = autoshard.plan(module, mesh, (batch(),), hints=HINTS, offload_optimizer="all", cluster=fast_links())
    plan = with_hosted(everything, "cube", "up.bias")
    alone = Net()
    train(alone, AdamW(alone.parameters(), lr=0.01), 4)
    with simulated_mesh(**mesh) as device_mesh:
        module = parallelized(device_mesh, "none", plan=autoshard.ShardingPlan.from_json(plan.to_json()))
        optimizer = Recorded(module.parameters(), lr=0.01)
        train(module, optimizer)
        device, *hosted = optimizer.seen[-3:]
        assert {id(each) for each in device} == {
            id(each) for name, each in module.named_parameters() if name not in plan.hosted
        }
        assert [[type(each) is DTensor for each in step] for step in hosted] == [[False], [False]]
        for parameter in (module.cube, module.up.bias):
            for name in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[parameter][name]
                assert isinstance(state, DTensor)
                assert state.placements == parameter.placements
        # A step that fails leaves all as it was.
        module(batch(3)).backward()
        optimizer.fails = True
        with pytest.raises(ValueError, match="out of order"):
            optimizer.step()
        optimizer.fails = False
        train(module, optimizer, 1, 3)
        assert [id(each) for each in optimizer.param_groups[0]["params"]] == [*map(id, module.parameters())]
        check_equal(module, alone)
        # Autograd sees the update.
        loss = module(batch())
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("offload_optimizer", ["all", "auto"])
def test_state_is_on_the_host_where_the_first_call_made_none(offload_optimizer: str) -> None:
    alone = Net()
    train(alone, AdamW(alone.parameters(), lr=0.01))
    options: dict[str, Any] = {"hints": HINTS, "cluster": fast_links(), "offload_optimizer": offload_optimizer}
    peak = autoshard.plan(Net(), {"tp": 2}, (batch(),), **options | {"offload_optimizer": "all"}).memory.peak
    with simulated_mesh(tp=2) as mesh:
        module = Net()
        with torch.no_grad():
            autoshard.parallelize(module, mesh, (batch(),), memory_limit=peak, **options)
        optimizer = Recorded(module.parameters(), lr=0.01)
        train(module, optimizer)
        assert len(optimizer.seen) > 3  # some updates are the host's
        check_equal(module, alone)


def checkpoints_move_between_host_and_device(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    options = {"lr": 0.01, "weight_decay": 0.1}
    alone = Net()
    train(alone, AdamW(alone.parameters(), **options), 4)
    for number, (saving, loading) in enumerate([("all", "none"), ("none", "all"), ("all", "all")]):
        first, second, third = (parallelized(mesh, where) for where in (saving, loading, loading))
        saved = AdamW(first.parameters(), **options)
        train(first, saved, 2)
        # By torch.distributed.checkpoint.
        file = str(Path(folder, str(number)))
        dcp.save({"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, saved)}, checkpoint_id=file)
        loaded = AdamW(second.parameters(), **options)
        state = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, loaded)}
        dcp.load(state, checkpoint_id=file)
        set_optimizer_state_dict(second, loaded, state["optimizer"])
        # As torch's optimizers do, before the first step and behind it.
        direct = AdamW(third.parameters(), **options)
        third.load_state_dict(first.state_dict())
        direct.load_state_dict(copy.deepcopy(saved.state_dict()))  # torch's share the memory of the saved one
        train(third, direct, 1, 2)
        third.load_state_dict(first.state_dict())
        direct.load_state_dict(copy.deepcopy(saved.state_dict()))
        for module, optimizer in ((second, loaded), (third, direct)):
            train(module, optimizer, 2, 2)
            check_equal(module, alone)
            assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())


def test_checkpoints_move_between_host_and_device(tmp_path: Path) -> None:
    with Workers(2) as workers:
        workers.run(checkpoints_move_between_host_and_device, str(tmp_path))


def test_optimizers_that_cannot_are_refused_before_anything_is_changed() -> None:
    with simulated_mesh(tp=2) as mesh:
        module = parallelized(mesh)
        module(batch()).backward()
        before = get_full(module, "cube").clone()
        with pytest.raises(InputError, match=r"LBFGS can't keep its state for 'cube' on the host.* SGD, Adam, "):
            torch.optim.LBFGS([module.cube]).step(lambda: 0.0)
        with pytest.raises(InputError, match="Adafactor can't keep"):
            autoshard.Adafactor(module.parameters()).step()
        with pytest.raises(InputError, match="CUDA graphs"):
            AdamW(module.parameters(), capturable=True).step()
        with pytest.raises(InputError, match="computes gradients within the step"):
            SGD(module.parameters()).step(lambda: 0.0)
        torch.testing.assert_close(get_full(module, "cube"), before, rtol=0, atol=0)


def test_updates_wait_for_copies_and_the_device_for_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, int]] = []

    def begin(copy: Tensor, source: Tensor, device: torch.device, direction: str) -> Tensor:
        log.append((direction, source.numel()))
        event = mock.Mock()
        event.synchronize.side_effect = lambda: log.append(("host waits", copy.numel()))
        setattr(copy, host_copies._COPIED, event)
        return copy.copy_(source)

    stream = mock.Mock()
    stream.current_stream.return_value.wait_event.side_effect = lambda _: log.append(("device waits", 0))
    monkeypatch.setattr(host_states, "copy_aside", begin)
    module, alone = Net(), Net()
    with first_rank({"tp": 2}) as mesh:
        autoshard.parallelize(
            module, mesh, (batch(),), hints={"*": Replicate()}, offload_optimizer="all", cluster=fast_links()
        )
        for net in (module, alone):
            optimizer = AdamW([net.up.weight, net.cube], lr=0.01)
            net.up.weight.grad, net.cube.grad = (torch.ones_like(each) for each in (net.up.weight, net.cube))
            with mock.patch.object(torch, "get_device_module", return_value=stream):
                optimizer.step()
        check_equal(module, alone)
    there = [("to host", 32)] * 2 + [("to host", 60)] * 2
    updates = [("host waits", 32)] * 2 + [("from host", 32)] + [("host waits", 60)] * 2 + [("from host", 60)]
    assert log == [*there, *updates, *[("device waits", 0)] * 2]
