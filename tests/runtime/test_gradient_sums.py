"""Gradients that `autoshard.no_sync` leaves unreduced, against one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.errors import InputError
from tests.runtime.meshes import simulated_mesh
from tests.training import Calls, fast_links, held_by_ranks

MICROBATCHES = 4
ROWS = 8
DATA_PARALLEL = {"*": {"dp": Replicate()}}
IN_SHARDS = {"*.weight": {"dp": Shard(0)}}


class Net(nn.Module):
    """Two losses, and a linear layer that no split of rows divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 5)
        self.norm = nn.LayerNorm(5)
        self.double()

    def forward(self, x: Tensor, far: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.up(x).sin()
        loss = self.norm(self.down(hidden)).square().mean()
        return (loss, hidden.square().mean()) if far else loss


def _batches(rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, dtype=torch.float64, generator=generator) for _ in range(MICROBATCHES)]


def _same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        pairs = [(parameter, expected)]
        if expected.grad is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            pairs.append((parameter.grad, expected.grad))
        for value, reference in pairs:
            for held in held_by_ranks(value.detach()):
                torch.testing.assert_close(held, reference.detach(), rtol=1e-9, atol=1e-12, msg=name)


@contextlib.contextmanager
def _models(hints: Any, **mesh: int) -> Iterator[tuple[nn.Module, nn.Module, list[Tensor]]]:
    """The net on a mesh of ranks in this process and on one device, and microbatches."""
    model, alone, batches = Net(), Net(), _batches()
    with simulated_mesh(**mesh) as device_mesh:
        autoshard.parallelize(model, device_mesh, (batches[0],), hints=hints, cluster=fast_links())
        yield model, alone, batches


def _accumulate(model: nn.Module, losses: list[Callable[[nn.Module], Tensor]], parallel: bool) -> list[int]:
    """Backwards of all losses, of which the last one reduces; returns the collectives of each."""
    counts = []
    for place, loss in enumerate(losses):
        calls = Calls()
        with calls:
            if parallel and place < len(losses) - 1:
                with autoshard.no_sync(model):
                    loss(model).backward()
            else:
                loss(model).backward()
        counts.append(sum(calls.counts.values()))
    return counts


@pytest.mark.parametrize("hints", [DATA_PARALLEL, IN_SHARDS])
def test_gradients_are_reduced_once(hints: Any) -> None:
    """Over two steps with AdamW and clipping; the second microbatch of a step counts as the first would."""
    with _models(hints, dp=2, tp=2) as (model, alone, batches):
        optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, alone)]
        losses = [lambda net, x=x: net(x) / MICROBATCHES for x in batches]
        for _ in range(2):
            calls = Calls()
            with calls:
                model(batches[0]).backward()
            every = sum(calls.counts.values())
            model.zero_grad()
            first, *others, last = _accumulate(model, losses, parallel=True)
            _accumulate(alone, losses, parallel=False)
            assert first < every
            assert others == [first] * (MICROBATCHES - 2)
            assert last == every
            for net in (model, alone):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            _same(model, alone)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            _same(model, alone)


@pytest.mark.parametrize("hints", [DATA_PARALLEL, IN_SHARDS])
def test_gradients_that_are_reduced_in_a_narrower_dtype_are_added_up_in_that_of_the_parameter(hints: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    model, every, batches = Net(), Net(), _batches()
    losses = [lambda net, x=x: net(x) / MICROBATCHES for x in batches]
    with simulated_mesh(dp=2) as mesh:
        for net in (model, every):
            autoshard.parallelize(
                net, mesh, (batches[0],), hints=hints, cluster=fast_links(), mp_policy=policy, accumulate=MICROBATCHES
            )
        whole, *_ = _accumulate(every, losses, parallel=False)
        first, *others, last = _accumulate(model, losses, parallel=True)
        assert first < whole
        assert others == [first] * (MICROBATCHES - 2)
        assert last == whole
        for parameter, reference in zip(model.parameters(), every.parameters(), strict=True):
            assert parameter.grad is not None
            assert reference.grad is not None
            assert parameter.grad.dtype == torch.float64
            pairs = zip(held_by_ranks(parameter.grad), held_by_ranks(reference.grad), strict=True)
            for held, expected in pairs:
                torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-6)


def test_other_programs_and_losses() -> None:
    """Microbatches of two sizes, one of several losses, forwards before the context, and the same call twice."""
    with _models(DATA_PARALLEL, dp=2) as (model, alone, (x, y, z, _)):

        def both(net: nn.Module) -> Tensor:
            return net(x) + net(y)

        def far(net: nn.Module) -> Tensor:
            return net(z, far=True)[1]

        for losses in (
            [lambda net: net(x), lambda net: net(y[:4])],
            [lambda net: net(x[:4]), lambda net: net(y), lambda net: net(z[:4]), lambda net: net(z)],
            [far, far],
            # The last backward has no gradient for `down` and `norm`.
            [lambda net: net(x, far=True)[0], far],
            [both, both],
            # More than the loss is differentiated.
            [lambda net: net(x), lambda net: sum(net(z, far=True))],
        ):
            _accumulate(model, losses, parallel=True)
            _accumulate(alone, losses, parallel=False)
            _same(model, alone)
            for net in (model, alone):
                net.zero_grad()
        early = model(x)
        with autoshard.no_sync(model):
            early.backward()
            late = [model(y), model(z)]
        for loss in late:
            loss.backward()
        for loss in (alone(x), alone(y), alone(z)):
            loss.backward()
        _same(model, alone)


def test_gradients_that_are_not_reduced() -> None:
    with _models(DATA_PARALLEL, dp=2) as (model, alone, (x, y, *_)):
        optimizer, other = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, alone))
        with autoshard.no_sync(model):
            model(x).backward()
        for arguments in ((), (lambda: None,)):
            with pytest.raises(InputError, match=r"optimizer.step\(\) while gradients are not reduced"):
                optimizer.step(*arguments)
        # Nothing is left of gradients that were dropped.
        optimizer.zero_grad()
        with autoshard.no_sync(model):
            model(y).backward()
        alone(y).backward()
        # A closure runs the last backward in the step.
        optimizer.step(lambda: model(x).backward())
        other.step(lambda: alone(x).backward())
        _same(model, alone)
        with pytest.raises(InputError, match="no_sync is for the module"), autoshard.no_sync(alone):
            pass
