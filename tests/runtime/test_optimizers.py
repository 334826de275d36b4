"""Optimizers of parallelised modules: those that can't step are refused, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

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
    for kind in (torch.optim.Adafactor, torch.optim.Rprop):
        for net in (module, alone):
            optimizer = kind(net.parameters())
            net(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(get_full(module, "up.weight"), alone.up.weight, rtol=1e-9, atol=0)


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
