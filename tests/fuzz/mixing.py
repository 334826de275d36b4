"""What mixes positions: convolutions, recurrences, routing, gathers and scatters, Fourier transforms."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.block import EXPERTS, Block, Registry

BLOCKS = Registry()


@BLOCKS.block(weight="WW3")
def convolution(p: Block, x: Tensor) -> Tensor:
    return F.conv1d(x.mT, p.weight, padding=1).mT


@BLOCKS.block(weight="W13", bias="W")
def causal_depthwise(p: Block, x: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.mT, (2, 0)), p.weight, p.bias, groups=p.width).mT


@BLOCKS.block(weight="WW3")
def dilated_convolution(p: Block, x: Tensor) -> Tensor:
    return F.conv1d(x.mT, p.weight, padding=2, dilation=2).mT


@BLOCKS.block(weight="WW33")
def image(p: Block, x: Tensor) -> Tensor:
    return F.conv2d(x.mT.unflatten(-1, (2, -1)), p.weight, padding=1).flatten(2).mT


@BLOCKS.block(weight="WW3")
def strided_and_back(p: Block, x: Tensor) -> Tensor:
    return F.interpolate(F.conv1d(x.mT, p.weight, padding=1, stride=2), size=x.shape[1]).mT


@BLOCKS.block(weight="WW3")
def convolution_transposed(p: Block, x: Tensor) -> Tensor:
    return F.conv_transpose1d(x.mT, p.weight, padding=1).mT


@BLOCKS.block(weight="WW")
def pools(p: Block, x: Tensor) -> Tensor:
    return (F.max_pool1d(x.mT, 3, 1, 1) + F.avg_pool1d(x.mT, 3, 1, 1)).mT @ p.weight


@BLOCKS.block(weight="WW")
def pooled_adaptively(p: Block, x: Tensor) -> Tensor:
    return x + F.adaptive_avg_pool1d(x.mT, 2).repeat_interleave(3, -1).mT @ p.weight


@BLOCKS.block(decay="W", inner="WW")
def recurrence(p: Block, x: Tensor) -> Tensor:
    state, states = x[:, 0], []
    for step in range(x.shape[1]):
        state = state * p.decay.sigmoid() + x[:, step] @ p.inner
        states.append(state)
    return torch.stack(states, 1)


@BLOCKS.block(inner="WW", outer="WW")
def recurrence_of_tanh(p: Block, x: Tensor) -> Tensor:
    states = [torch.zeros_like(x[:, 0])]
    for step in x.unbind(1):
        states.append(torch.tanh(step @ p.inner + states[-1] @ p.outer))
    return torch.stack(states[1:], 1)


@BLOCKS.block(inner="WF", outer="WF")
def minimal_gated_unit(p: Block, x: Tensor) -> Tensor:
    state, out = x.new_zeros(x.shape[0], p.width), torch.empty_like(x)
    for step in range(x.shape[1]):
        gate, new = (x[:, step] @ p.inner + state @ p.outer).chunk(2, -1)
        state = torch.lerp(state, new.tanh(), gate.sigmoid())
        out[:, step] = state
    return out


@BLOCKS.block(first="WW", decay="W")
def doubling_scan(p: Block, x: Tensor) -> Tensor:
    values, decay, reach = x @ p.first, p.decay.sigmoid(), 1
    while reach < x.shape[1]:
        values = values + decay**reach * F.pad(values, (0, 0, reach, 0))[:, : x.shape[1]]
        reach *= 2
    return values


@BLOCKS.block(rate="W", into="WD", out="WD", step="WW")
def selective_scan(p: Block, x: Tensor) -> Tensor:
    steps = F.softplus(x @ p.step)
    keep = (-steps * p.rate.exp())[..., None].exp()
    add = (steps * x)[..., None] * (x @ p.into)[:, :, None]
    state, read = torch.zeros_like(add[:, 0]), x @ p.out
    results = []
    for place in range(x.shape[1]):
        state = keep[:, place] * state + add[:, place]
        results.append((state * read[:, place, None]).sum(-1))
    return torch.stack(results, 1)


@BLOCKS.block(decay="W")
def sum_of_decays(p: Block, x: Tensor) -> Tensor:
    logs = F.logsigmoid(p.decay) * torch.ones_like(x)
    return torch.logcumsumexp(x + logs.cumsum(1), 1) - logs.cumsum(1)


@BLOCKS.block(weight="WW")
def running_products(p: Block, x: Tensor) -> Tensor:
    return (1 + 0.1 * x).cumprod(1) @ p.weight


@BLOCKS.block(weight="WW")
def running_maxima(p: Block, x: Tensor) -> Tensor:
    return x.cummax(1).values @ p.weight


@BLOCKS.block(router="WE", up="EWF", down="EFW")
def experts_for_all(p: Block, x: Tensor) -> Tensor:
    weights = (x @ p.router).softmax(-1)
    each = torch.einsum("btef,efw->btew", torch.einsum("btw,ewf->btef", x, p.up).relu(), p.down)
    return (each * weights[..., None]).sum(2)


@BLOCKS.block(router="WE", up="EWF", down="EFW")
def best_experts(p: Block, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, p.width)
    weights, chosen = (tokens @ p.router).softmax(-1).topk(2, -1)
    gates = torch.zeros(tokens.shape[0], EXPERTS, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
    each = torch.bmm(torch.bmm(tokens.expand(EXPERTS, -1, -1), p.up).relu(), p.down)
    return torch.einsum("te,etw->tw", gates, each).view_as(x)


@BLOCKS.block(router="WE", expert="EWW")
def loop_over_experts(p: Block, x: Tensor) -> Tensor:
    chosen = (x @ p.router).argmax(-1)
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        out = out + torch.where((chosen == number)[..., None], x @ p.expert[number], 0.0)
    return out


@BLOCKS.block(router="WE", expert="EWW")
def gathered_experts(p: Block, x: Tensor) -> Tensor:
    best, chosen = (x @ p.router).softmax(-1).max(-1)
    return best[..., None] * (x[..., None, :] @ p.expert[chosen])[..., 0, :]


@BLOCKS.block(router="WE", expert="EWW")
def experts_with_capacity(p: Block, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, p.width)
    weights, chosen = (tokens @ p.router).softmax(-1).max(-1)
    ones = F.one_hot(chosen, EXPERTS)
    place = (ones.cumsum(0) * ones).sum(-1) - 1
    kept = place < 4
    slots = torch.where(kept, chosen * 4 + place, EXPERTS * 4)
    held = x.new_zeros(EXPERTS * 4 + 1, p.width).index_copy(0, slots, tokens * kept[:, None])
    out = F.pad(torch.bmm(held[:-1].view(EXPERTS, 4, -1), p.expert).flatten(0, 1), (0, 0, 0, 1))
    return (out[slots] * weights[:, None]).view_as(x)


@BLOCKS.block(weight="WW")
def sorted_along_time(p: Block, x: Tensor) -> Tensor:
    return x.sort(1).values @ p.weight


@BLOCKS.block(weight="WW")
def gathered_by_rank(p: Block, x: Tensor) -> Tensor:
    order = x[..., 0].argsort(1)
    return x.gather(1, order[..., None].expand_as(x)) @ p.weight


@BLOCKS.block(weight="WW")
def scattered_by_rank(p: Block, x: Tensor) -> Tensor:
    order = x[..., 0].argsort(1)[..., None].expand_as(x)
    return torch.zeros_like(x).scatter(1, order, x @ p.weight)


@BLOCKS.block(weight="WW")
def scattered_and_added(p: Block, x: Tensor) -> Tensor:
    bins = (x[..., :1] > 0).long().expand_as(x)
    sums = x.new_zeros(x.shape[0], 2, p.width).scatter_add(1, bins, x @ p.weight)
    return x + sums.gather(1, bins)


@BLOCKS.block(weight="WW")
def scattered_maxima(p: Block, x: Tensor) -> Tensor:
    bins = (x[..., :1] > 0).long().expand_as(x)
    best = x.new_full((x.shape[0], 2, p.width), -10.0).scatter_reduce(1, bins, x, "amax")
    return best.gather(1, bins) @ p.weight


@BLOCKS.block(weight="WW")
def added_at_indices(p: Block, x: Tensor) -> Tensor:
    tokens = x.reshape(-1, p.width)
    bins = torch.arange(tokens.shape[0], device=x.device) % 5
    sums = x.new_zeros(5, p.width).index_add(0, bins, tokens @ p.weight)
    return sums[bins].view_as(x)


@BLOCKS.block(weight="WW")
def put_at_indices(p: Block, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    best = x[..., 0].argmax(1)
    out = x @ p.weight
    return out.index_put((rows, best), x[rows, best])


@BLOCKS.block(table="TW")
def embedding(p: Block, x: Tensor) -> Tensor:
    return F.embedding((x[..., 0] * 3).long().clamp(-8, 8) + 8, p.table) + x


@BLOCKS.block(table="TW", weight="WW")
def codebook(p: Block, x: Tensor) -> Tensor:
    nearest = torch.cdist(x.detach(), p.table.expand(x.shape[0], -1, -1)).argmin(-1)
    codes = p.table[nearest]
    return (x + (codes - x).detach()) @ p.weight + (codes - x.detach()).square()


@BLOCKS.block(weight="WW")
def unfolding(p: Block, x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).mean(-1) @ p.weight


@BLOCKS.block(gain="W")
def fourier(p: Block, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * (1 + p.gain), n=x.shape[1], dim=1)


@BLOCKS.block(weight="WW")
def fourier_of_both(p: Block, x: Tensor) -> Tensor:
    return torch.fft.fft2(x @ p.weight, norm="ortho").real


def _wide(x: Tensor) -> Tensor:
    """The tensor in a precision that has Fourier transforms."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@BLOCKS.block(gain="W", shift="W")
def fourier_filter(p: Block, x: Tensor) -> Tensor:
    filters = torch.complex(_wide(p.gain), _wide(p.shift))
    spectrum = torch.fft.rfft2(_wide(x), norm="ortho") * filters[: p.width // 2 + 1]
    return torch.fft.irfft2(spectrum, s=x.shape[1:], norm="ortho").to(x.dtype)


@BLOCKS.block(kernel="FW", weight="WW")
def long_convolution(p: Block, x: Tensor) -> Tensor:
    size = 2 * x.shape[1]
    spectrum = torch.fft.rfft(_wide(x), n=size, dim=1) * torch.fft.rfft(_wide(p.kernel[: x.shape[1]]), n=size, dim=0)
    return torch.fft.irfft(spectrum, n=size, dim=1)[:, : x.shape[1]].to(x.dtype) @ p.weight


@BLOCKS.block(weight="WW")
def fourier_in_place_of_attention(p: Block, x: Tensor) -> Tensor:
    return torch.fft.fft(torch.fft.fft(_wide(x @ p.weight), dim=-1), dim=1).real.to(x.dtype)


@BLOCKS.block(weight="WW", gain="W")
def logs_of_spectrum(p: Block, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(_wide(x @ p.weight), dim=-1)
    power = spectrum.real.square() + spectrum.imag.square()
    logs = power.log() + spectrum.abs().clamp(min=1e-5).log10()
    return x + p.gain * F.pad(logs, (0, p.width - logs.shape[-1])).to(x.dtype) * 0.1


@BLOCKS.block(weight="WW", gain="W")
def phases(p: Block, x: Tensor) -> Tensor:
    spectrum = torch.fft.fft(_wide(x @ p.weight), dim=1, norm="ortho")
    turned = torch.polar(spectrum.abs(), spectrum.angle() * _wide(p.gain).cos())
    unit = spectrum / spectrum.abs()
    return (torch.fft.ifft(turned, dim=1, norm="ortho").real + unit.imag).to(x.dtype)


@BLOCKS.block(weight="WW")
def short_spectra(p: Block, x: Tensor) -> Tensor:
    waves = _wide(x @ p.weight).mT.flatten(0, 1)
    spectra = torch.stft(waves, 4, 2, window=torch.hann_window(4, dtype=waves.dtype), return_complex=True)
    size = (spectra.abs() + 1e-3).mean((1, 2)).view(x.shape[0], 1, -1)
    return x * size.log1p().to(x.dtype)


@BLOCKS.block(shift="W", weight="WW")
def token_shift(p: Block, x: Tensor) -> Tensor:
    before = F.pad(x, (0, 0, 1, -1))
    return (x + (before - x) * p.shift) @ p.weight


@BLOCKS.block(weight="WW")
def flips(p: Block, x: Tensor) -> Tensor:
    return x.flip(1) @ p.weight + x.flip(2)


@BLOCKS.block(weight="WW")
def rolls(p: Block, x: Tensor) -> Tensor:
    return x.roll((1, 2), (1, 2)) @ p.weight


@BLOCKS.block(weight="WW")
def differences(p: Block, x: Tensor) -> Tensor:
    return x.diff(dim=1, prepend=x[:, :1]) @ p.weight


@BLOCKS.block(weight="WW")
def segments(p: Block, x: Tensor) -> Tensor:
    first, second = x.tensor_split(2, 1)
    return torch.cat([second @ p.weight, first], 1)


@BLOCKS.block(weight="WW")
def mixer_over_batch(p: Block, x: Tensor) -> Tensor:
    among = (x.flatten(1) @ x.flatten(1).mT).softmax(-1)
    return torch.einsum("bc,ctw->btw", among, x) @ p.weight


@BLOCKS.block(weight="WW")
def distances(p: Block, x: Tensor) -> Tensor:
    far = (x[:, :, None] - x[:, None]).square().sum(-1)
    return (-far).softmax(-1) @ x @ p.weight


@BLOCKS.block(weight="WW")
def graph_of_neighbours(p: Block, x: Tensor) -> Tensor:
    near = torch.cdist(x.detach(), x.detach()).topk(3, largest=False).indices
    rows = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return x[rows, near].amax(2) @ p.weight


@BLOCKS.block(weight="WW")
def pairs_in_triangle(p: Block, x: Tensor) -> Tensor:
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    pairs = x[:, first] * x[:, second]
    return x + torch.zeros_like(x).index_add(1, first, pairs @ p.weight)
