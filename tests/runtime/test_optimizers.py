"""Optimizers of parallelised modules: those that can't step are refused, before anything is changed."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

import autoshard
from autoshard.errors import InputError
from tests.runtime.meshes import get_full, simulated_mesh
from tests.training import fast_links
from tests.workers import Workers


class OwnOptimizer:
    """Holds parameters, and is none of torch's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin()).square().mean()

    def resize_token_embeddings(self, count: int) -> None:
        self.up = nn.Linear(count, 8)


def parallelized(hints: dict[str, object]) -> tuple[Net, torch.Tensor]:
    x = torch.randn(4, 4, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return autoshard.parallelize(Net(), mesh, example_args=(x,), hints=hints), x


def sharded_steps_are_refused() -> None:
    module, x = parallelized({"*.weight": Shard(0)})
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):
        optimizer = kind(module.parameters())
        module(x).backward()
        before = get_full(module, "up.weight")
        for _ in range(2):
            with pytest.raises(InputError, match=rf"{kind.__name__} can't step .*'up.weight' lies as .*Shard\(dim=0\)"):
                optimizer.step()
        assert not optimizer.state
        assert torch.equal(get_full(module, "up.weight"), before)
        optimizer.zero_grad()


def whole_parameters_step() -> None:
    module, x = parallelized({"*": Replicate()})
    alone = Net()
    for kind, foreach in itertools.product((torch.optim.Adafactor, torch.optim.Rprop), (False, True)):
        for net in (module, alone):
            optimizer = kind(net.parameters(), foreach=foreach)
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(get_full(module, "up.weight"), alone.up.weight, rtol=1e-9, atol=0)


class Cube(Net):
    """With a parameter of three dims, of which two ranks hold unequal parts, and one of none."""

    def __init__(self) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).sin()) @ self.cube * self.scale).square().mean()


def every_other_optimizer_steps_on_shards() -> None:
    """All of torch's, and Adafactor of this library, on strided and uneven shards."""
    x = torch.randn(4, 4, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hints = {"up.*": _StridedShard(0, split_factor=2), "down.weight": Shard(1), "cube": Shard(2)}
    module, alone = autoshard.parallelize(Cube(), mesh, (x,), hints=hints), Cube()
    assert module.cube.placements == (Shard(2),)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    # The last refuses gradients that are not sparse, on one device, too.
    kinds -= {Optimizer, torch.optim.Adafactor, torch.optim.Rprop, torch.optim.SparseAdam}
    cases = [(kind, kind, {}) for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    forms = [("foreach", True), ("foreach", False), ("fused", True)]
    cases += [
        (kind, kind, {name: value})
        for kind, _, _ in tuple(cases)
        for name, value in forms
        if name in inspect.signature(kind).parameters
    ]
    refused: dict[type[Optimizer], bool] = {}
    options = {"weight_decay": 0.1, "maximize": True, "d": 1.5, "eps": (1e-8, 1e-2)}
    cases += [(autoshard.Adafactor, torch.optim.Adafactor, given) for given in ({}, options)]
    for ours, theirs, given in cases:
        for net, kind in ((module, ours), (alone, theirs)):
            net.load_state_dict(state)
            matrices = [value for value in net.parameters() if ours is not torch.optim.Muon or value.ndim == 2]
            optimizer = kind(matrices, lr=0.01, **given)

            def closure(net: nn.Module = net) -> torch.Tensor:
                net.zero_grad()
                loss = net(x)
                loss.backward()
                return loss

            try:
                for _ in range(2):
                    optimizer.step(closure)
            except InputError as error:
                # Named, where torch has no operator for it; nothing was changed. Adagrad begins with a state.
                stepped = any(float(each.get("step", 0)) for each in optimizer.state.values())
                refused[kind] = not stepped and f"{kind.__name__}(fused=True) can't step" in str(error)
                break
        if ours in refused:
            alone.load_state_dict(state)
        # Muon's products are in bfloat16, and round otherwise where they are summed over ranks.
        tolerance = 1e-2 if ours is torch.optim.Muon else 1e-9
        for name, expected in alone.named_parameters():
            torch.testing.assert_close(get_full(module, name), expected, rtol=tolerance, atol=tolerance, msg=f"{ours}")
    assert set(refused) <= {torch.optim.SGD, torch.optim.Adagrad}
    assert all(refused.values())


def anomalies_are_found() -> None:
    module, x = parallelized({"*.weight": Shard(0)})
    alone = Net()
    with torch.autograd.detect_anomaly(check_nan=True):
        module(x).backward()
    alone(x).backward()
    gradient = module.up.weight.grad
    assert torch.allclose(gradient.full_tensor(), alone.up.weight.grad, rtol=1e-9, atol=0)
    with pytest.raises(RuntimeError, match="returned nan values"), torch.autograd.detect_anomaly():
        (module(x) * torch.nan).backward()


def foreach_steps_before_backward_are_refused() -> None:
    module, x = parallelized({"*": Replicate()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, foreach=True)
    module(x).backward()
    loss = module(x)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def resizing_is_refused() -> None:
    module, _ = parallelized({})
    with pytest.raises(InputError, match=r"Call resize_token_embeddings before autoshard.parallelize"):
        module.resize_token_embeddings(6)
    assert module.up.weight.shape == (8, 4)


def all_of_it() -> None:
    sharded_steps_are_refused()
    whole_parameters_step()
    every_other_optimizer_steps_on_shards()
    anomalies_are_found()
    foreach_steps_before_backward_are_refused()
    resizing_is_refused()


def test_optimizers_anomalies_and_resizing(two: Workers) -> None:
    two.run(all_of_it)


@pytest.mark.parametrize(
    ("make", "warns"),
    [(OwnOptimizer, True), (torch.optim.SGD, False), (lambda parameters: None, False)],
    ids=["own", "torch's", "none"],
)
@pytest.mark.parametrize("planned", [True, False])
def test_whatever_else_holds_the_parameters_from_before_is_told_of_once(
    make: Callable[[Iterable[nn.Parameter]], object], warns: bool, planned: bool
) -> None:
    module, x = Net(), torch.randn(4, 4, dtype=torch.float64)
    with simulated_mesh(x=2) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(module.parameters())
        autoshard.parallelize(module, mesh, (x,) if planned else (), cluster=fast_links())
        for _ in range(3):
            module(x).backward()
    message = [str(one.message) for one in caught if "are still referred to" in str(one.message)]
    assert [text.split()[0] for text in message] == ["4"] * warns
    del optimizer
