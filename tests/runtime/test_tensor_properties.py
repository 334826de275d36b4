"""Properties of tensors that no shape shows: lazy conjugates and negatives, inference tensors, sparse gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from tests.runtime.meshes import get_full
from tests.training import fast_links
from tests.workers import Workers


class Lazy(nn.Module):
    """Reads a parameter, buffers and a constant that are lazy, and takes parts of lazy results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 8, dtype=torch.float64)
        turns = torch.polar(torch.ones(5, dtype=torch.float64), torch.arange(5, dtype=torch.float64))
        self.phase = nn.Parameter(turns.clone().conj())
        self.register_buffer("turns", turns.clone().conj())
        self.register_buffer("negative", turns.conj().imag)
        self.constant = turns.conj()

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        self.turns.mul_(1.5)
        y = torch.fft.rfft(self.up(x), dim=-1) * self.phase * self.turns
        # In place, by way of views that are lazy, and with complex numbers.
        y.conj().mul_(0.5 + 1j)
        y.conj()[1:3].div_(2j)
        y.conj().imag.sub_(0.5)
        parts = (y.conj().real, y.mH.imag.mT, torch.view_as_real((y * self.constant).conj().resolve_conj()).sum(-1))
        return torch.stack(parts).sum(0) * self.negative + torch.view_as_real(z * z.conj().mT.mT).sum(-1)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(13, 8, sparse=True, dtype=torch.float64)
        self.bag = nn.EmbeddingBag(13, 8, mode="mean", sparse=True, dtype=torch.float64)
        self.picked = nn.Parameter(torch.randn(13, 8, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        picked = torch.gather(self.picked, 0, ids.repeat(1, 2), sparse_grad=True)
        rows = F.embedding(ids, self.rows.weight, padding_idx=2, sparse=True)
        return self.rows(ids).mean(1) + rows.sum(1) + self.bag(ids) + picked


def _parallel(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    return autoshard.parallelize(module, mesh, cluster=fast_links(), search=autoshard.Search(effort="fast"))


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for name, expected in theirs.named_parameters():
        torch.testing.assert_close(get_full(ours, name), expected.detach().resolve_conj(), rtol=1e-9, atol=1e-9)
        gradient = ours.get_parameter(name).grad
        assert (gradient is None) == (expected.grad is None), name
        if gradient is not None:
            dense = expected.grad.to_dense() if expected.grad.is_sparse else expected.grad
            torch.testing.assert_close(gradient.full_tensor(), dense.resolve_conj(), rtol=1e-9, atol=1e-9)
    for name, expected in theirs.named_buffers():
        torch.testing.assert_close(get_full(ours, name), expected.resolve_conj().resolve_neg(), rtol=1e-9, atol=1e-9)


def lazy_conjugates_and_negatives() -> None:
    ours, theirs = _parallel(Lazy()), Lazy()
    x = torch.randn(6, 8, dtype=torch.complex128).conj().imag
    z = torch.randn(6, 5, dtype=torch.complex128).conj()
    for net in (ours, theirs):
        y = net(x, z)
        # The gradient of the output is a lazy negative.
        torch.complex(y, y * 2).conj().imag.sum().backward()
    _assert_same(ours, theirs)


def first_call_in_inference_mode() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        with torch.inference_mode():
            module[1].running_mean = torch.ones(8, dtype=torch.float64)
        return module.eval()

    ours, theirs = _parallel(net()), net()
    with torch.inference_mode():
        x = torch.randn(6, 8, dtype=torch.float64)
        result, expected = ours(x), theirs(x)
        assert result.is_inference()
    torch.testing.assert_close(result.clone(), expected.clone(), rtol=1e-9, atol=1e-9)
    # One device does not differentiate by way of a buffer of inference mode; here it was replaced.
    theirs[1].running_mean = theirs[1].running_mean.clone()
    for module in (ours, theirs):
        module(x.clone()).square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    _assert_same(ours, theirs)


def sparse_gradients_are_dense() -> None:
    ours, theirs = _parallel(Tables()), Tables()
    ids = torch.randint(0, 13, (6, 4), generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours(ids).square().sum().backward()
    assert sum("sparse gradient" in str(warning.message) for warning in seen) == 1
    theirs(ids).square().sum().backward()
    _assert_same(ours, theirs)


CHECKS = [lazy_conjugates_and_negatives, first_call_in_inference_mode, sparse_gradients_are_dense]


@pytest.mark.parametrize("check", CHECKS)
def test_hidden_properties_on_two_ranks(check: Callable[[], None], two: Workers) -> None:
    two.run(check)
