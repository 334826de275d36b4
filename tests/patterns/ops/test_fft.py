from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autoshard
from tests.patterns.ops.soundness import assert_sound, aten, normal
from tests.precision import BFLOAT16, CastModule
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, compare, fast_links, held_by_ranks, train


@pytest.mark.parametrize(("dims", "shards"), [([2], "d0 d1"), ([0, 2], "d1"), ([1], "d0 d2")])
def test_dims_that_are_not_transformed_may_be_sharded(dims: list[int], shards: str) -> None:
    x = normal(4, 6, 12)
    spectrum = aten._fft_r2c(x, dims, 1, True)
    assert_sound(aten._fft_c2c.default, torch.complex(x, x + 1), dims, 0, True, shards=shards)
    assert_sound(aten._fft_r2c.default, x, dims, 1, True, shards=shards)
    assert_sound(aten._fft_c2r.default, spectrum, dims, 2, x.shape[dims[-1]], shards=shards)


class Filtered(nn.Module):
    """A learned filter of a signal's spectrum, and the short-time spectrum of what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.filter = nn.Linear(12, 12), nn.Parameter(torch.randn(7, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.linear(x)) * torch.view_as_complex(self.filter)
        signal = torch.fft.irfft(spectrum, n=12)
        short = torch.stft(signal, 4, window=torch.ones(4, dtype=x.dtype), return_complex=True)
        return signal.square().mean() + torch.view_as_real(short).abs().sum() + short.conj().real.mean()


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_training_with_spectra_is_training_on_one_device(sizes: dict[str, int]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 12)}
    torch.manual_seed(1)
    reference = train(Filtered(), inputs)
    torch.manual_seed(1)
    module = Filtered()
    with simulated_mesh(**sizes) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links())
        trace = train(module, inputs)
    assert compare(trace, reference).worst <= TOLERANCE


class Upcast(Filtered):
    """The filter in float32, whatever the precision around it: there is no spectrum in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.linear(x).float()) * torch.view_as_complex(self.filter.float())
        return torch.fft.irfft(spectrum, n=12).square().mean().to(x.dtype)


def test_spectra_of_float32_under_a_policy_of_bfloat16_are_near_those_of_one_device() -> None:
    torch.manual_seed(0)
    module, inputs = Upcast(), {"x": torch.randn(8, 12)}
    alone = CastModule(copy.deepcopy(module))
    loss = alone(**inputs)
    loss.backward()
    with simulated_mesh(dp=2) as mesh:
        autoshard.parallelize(module, mesh, (), inputs, cluster=fast_links(), mp_policy=BFLOAT16)
        ours = module(**inputs)
        ours.backward()
        pairs = [(ours, loss)]
        pairs += [(one.grad, two.grad) for one, two in zip(module.parameters(), alone.parameters(), strict=True)]
        for found, expected in pairs:
            for held in held_by_ranks(found.detach()):
                assert bool(torch.isfinite(held).all())
                assert (held - expected).abs().max() <= 0.05 * expected.abs().max()
