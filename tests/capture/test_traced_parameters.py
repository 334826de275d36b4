"""Code that finds a parameter or buffer elsewhere than in the module trains it as on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import CaptureError
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks

X = torch.randn(4, 8, dtype=torch.float64)
FOUND: dict[str, Any] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full((8,), 1.5, dtype=torch.float64))
        self.register_buffer("shift", torch.linspace(0, 1, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y.square().mean()


def _hook(net: Any) -> None:
    net.part.register_forward_hook(lambda part, args, out: out * net.scale + net.shift)


def _partial(net: Any) -> None:
    def scaled(other: Any, part: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out * other.scale + other.shift

    net.part.register_forward_hook(functools.partial(scaled, net))


def _forward(net: Any) -> None:
    before = net.part.forward
    net.part.forward = lambda x: torch.addcmul(net.shift, before(x), net.scale)


def _in_a_list(net: Any) -> None:
    net.calls = [lambda y: torch.stack([y * net.scale, net.shift.expand_as(y)]).sum(0)]
    net.part.register_forward_hook(lambda part, args, out: net.calls[0](out))


def _in_a_variable(net: Any) -> None:
    def scaled(part: nn.Module, args: Any, out: Tensor) -> Tensor:
        found = FOUND["net"]
        return out * found.scale.T + found.shift

    FOUND["net"] = net
    net.part.register_forward_hook(scaled)


@pytest.mark.parametrize("find", [_hook, _partial, _forward, _in_a_list, _in_a_variable])
def test_what_code_finds_elsewhere_is_trained(find: Callable[[nn.Module], None]) -> None:
    net = Net()
    alone = copy.deepcopy(net)
    find(alone)
    expected = _losses(alone)
    find(net)
    with simulated_mesh(a=2) as mesh:
        hints = {"scale": (Shard(0),)}
        autoshard.parallelize(net, mesh, (X,), cluster=fast_links(), hints=hints)
        for held in zip(*map(held_by_ranks, _losses(net)), strict=True):
            assert torch.allclose(torch.stack(held), torch.stack(expected), rtol=TOLERANCE)


def _losses(net: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for rows in (4, 4, 2):
        loss = net(X[:rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_a_view_made_before_is_refused_by_its_line() -> None:
    net = Net()
    rows = net.scale.detach()[:8]
    net.part.register_forward_hook(lambda part, args, out: out * rows)
    with pytest.raises(CaptureError, match=r"parameters\.py:\d+ .*reads a view of scale that was made outside"):
        capture(net, (X,), {})
