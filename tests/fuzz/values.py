"""What treats every position for itself: norms, activations, gates, views, complex numbers, writes in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.block import HEAD, Block, Registry

BLOCKS = Registry()
NORM = {"scale": "W", "shift": "W"}


@BLOCKS.block(up="WF", down="FW", bias="F")
def two_layers(p: Block, x: Tensor) -> Tensor:
    return F.gelu(x @ p.up + p.bias) @ p.down


@BLOCKS.block(up="WF", gate="WF", down="FW")
def swish_gated(p: Block, x: Tensor) -> Tensor:
    return (F.silu(x @ p.gate) * (x @ p.up)) @ p.down


@BLOCKS.block(both="WF", out="WW")
def gated_by_half(p: Block, x: Tensor) -> Tensor:
    return F.glu(x @ p.both) @ p.out


@BLOCKS.block(both="WF", out="WW")
def gated_by_every_other(p: Block, x: Tensor) -> Tensor:
    both = x @ p.both
    return (both[..., ::2] * both[..., 1::2].sigmoid()) @ p.out


@BLOCKS.block(up="WF", down="FW")
def squared_relu(p: Block, x: Tensor) -> Tensor:
    return (x @ p.up).relu().square() @ p.down


@BLOCKS.block(up="FW", bias="F", down="WF")
def linear_functions(p: Block, x: Tensor) -> Tensor:
    return F.linear(F.leaky_relu(F.linear(x, p.up, p.bias)), p.down)


@BLOCKS.block(weight="HDD")
def grouped_linear(p: Block, x: Tensor) -> Tensor:
    return torch.einsum("bthd,hde->bthe", x.unflatten(-1, (p.heads, HEAD)), p.weight).flatten(2)


@BLOCKS.block(low="WD", high="DW")
def low_rank(p: Block, x: Tensor) -> Tensor:
    return x + x @ (p.low @ p.high)


@BLOCKS.block(first="WW", second="WW", third="WWD")
def bilinear(p: Block, x: Tensor) -> Tensor:
    return F.bilinear(x @ p.first, x, p.third.permute(2, 0, 1)).repeat(1, 1, p.heads) @ p.second


@BLOCKS.block(**NORM)
def layer_norm(p: Block, x: Tensor) -> Tensor:
    return F.layer_norm(x, (p.width,), 1 + p.scale, p.shift)


@BLOCKS.block(**NORM)
def layer_norm_by_hand(p: Block, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + p.scale) + p.shift


@BLOCKS.block(scale="W")
def root_mean_square(p: Block, x: Tensor) -> Tensor:
    return F.rms_norm(x, (p.width,), 1 + p.scale)


@BLOCKS.block(scale="W")
def root_mean_square_by_hand(p: Block, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, True) + 1e-6) * (1 + p.scale)


@BLOCKS.block(scale="H")
def norm_of_heads(p: Block, x: Tensor) -> Tensor:
    heads = F.rms_norm(x.unflatten(-1, (p.heads, HEAD)), (HEAD,))
    return (heads * (1 + p.scale)[:, None]).flatten(2)


@BLOCKS.block(**NORM)
def group_norm(p: Block, x: Tensor) -> Tensor:
    return F.group_norm(x.mT, p.heads, 1 + p.scale, p.shift).mT


@BLOCKS.block(**NORM)
def instance_norm(p: Block, x: Tensor) -> Tensor:
    return F.instance_norm(x.mT, weight=1 + p.scale, bias=p.shift).mT


@BLOCKS.block(**NORM)
def batch_norm(p: Block, x: Tensor) -> Tensor:
    return F.batch_norm(x.mT, None, None, 1 + p.scale, p.shift, training=True).mT


@BLOCKS.block(**NORM)
def batch_norm_by_hand(p: Block, x: Tensor) -> Tensor:
    mean, variance = x.mean((0, 1)), x.var((0, 1), unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt() * (1 + p.scale) + p.shift


@BLOCKS.block(**NORM)
def variance_and_mean(p: Block, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=(0, 2), keepdim=True)
    return (x - mean) * (variance + 1e-3).rsqrt() * (1 + p.scale) + p.shift


@BLOCKS.block(scale="W")
def global_response(p: Block, x: Tensor) -> Tensor:
    size = x.norm(dim=1, keepdim=True)
    return x + p.scale * x * (size / (size.mean(-1, keepdim=True) + 1e-6))


@BLOCKS.block(scale="W")
def unit_length(p: Block, x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * p.scale.exp()


@BLOCKS.block(scale="1")
def largest_is_one(p: Block, x: Tensor) -> Tensor:
    return x / x.abs().amax((1, 2), keepdim=True) * (1 + p.scale)


@BLOCKS.block(squeeze="WD", excite="DW")
def squeeze_and_excite(p: Block, x: Tensor) -> Tensor:
    return x * ((x.mean(1, keepdim=True) @ p.squeeze).relu() @ p.excite).sigmoid()


@BLOCKS.block(scale="W")
def layer_scale(p: Block, x: Tensor) -> Tensor:
    return torch.addcmul(x, x.tanh(), p.scale)


@BLOCKS.block(knots="WD")
def splines(p: Block, x: Tensor) -> Tensor:
    places = torch.linspace(-1, 1, HEAD, dtype=x.dtype, device=x.device)
    return x + (torch.exp(-(x[..., None] - places).square()) * p.knots).sum(-1)


@BLOCKS.block(scale="W")
def polynomial(p: Block, x: Tensor) -> Tensor:
    return torch.stack([x.tanh() ** power for power in range(1, 4)], -1).sum(-1) * p.scale


@BLOCKS.block(weight="W")
def prelu(p: Block, x: Tensor) -> Tensor:
    return F.prelu(x.mT, p.weight).mT


@BLOCKS.block(scale="W")
def many_activations(p: Block, x: Tensor) -> Tensor:
    return F.mish(x) + F.softplus(x) * F.hardtanh(x) + F.elu(x) - F.hardswish(x * p.scale) + F.logsigmoid(x)


@BLOCKS.block(scale="W")
def special_functions(p: Block, x: Tensor) -> Tensor:
    return (
        torch.erf(x) + torch.special.expit(x) + torch.lgamma(x.abs() + 1) + torch.atan2(x, x.square() + p.scale.exp())
    )


@BLOCKS.block(scale="W")
def branches_by_where(p: Block, x: Tensor) -> Tensor:
    return torch.where(x > 0, x * p.scale, x.exp()).clamp(-3, 3)


@BLOCKS.block(scale="W")
def straight_through(p: Block, x: Tensor) -> Tensor:
    return x + (x.round() - x).detach() * p.scale


@BLOCKS.block(scale="W")
def masked_fills(p: Block, x: Tensor) -> Tensor:
    return x.masked_fill(x > 1, 1.0).masked_scatter(x < -1, x * p.scale)


@BLOCKS.block(weight="WW")
def complex_product(p: Block, x: Tensor) -> Tensor:
    numbers = torch.complex(x, x @ p.weight)
    return (numbers * numbers.conj().roll(1, 0)).real + numbers.angle().sin() + numbers.abs()


@BLOCKS.block(weight="WW")
def views(p: Block, x: Tensor) -> Tensor:
    batch, time, width = x.shape
    grid = x.view(batch, 2, time // 2, width // 2, 2).permute(0, 2, 1, 4, 3)
    return grid.reshape(batch, time, width) @ p.weight


@BLOCKS.block(weight="WW")
def flat_rows(p: Block, x: Tensor) -> Tensor:
    return (x.flatten(0, 1) @ p.weight).relu().unflatten(0, x.shape[:2])


@BLOCKS.block(weight="WW")
def time_first(p: Block, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).contiguous()
    return (rows.view(-1, p.width) @ p.weight).view_as(rows).transpose(0, 1)


@BLOCKS.block(weight="WW")
def pixels_shuffled(p: Block, x: Tensor) -> Tensor:
    grid = x.mT.unflatten(-1, (2, -1))
    return F.pixel_unshuffle(F.pixel_shuffle(grid, 2), 2).flatten(2).mT @ p.weight


@BLOCKS.block(weight="WW")
def broadcast_views(p: Block, x: Tensor) -> Tensor:
    first = x[:, :1].expand_as(x)
    return (first * x.as_strided(x.shape, x.contiguous().stride()) if x.is_contiguous() else first * x) @ p.weight


@BLOCKS.block(weight="WW")
def halves_and_stacks(p: Block, x: Tensor) -> Tensor:
    even, odd = x[:, ::2], x[:, 1::2]
    return torch.stack([even + odd, (even - odd) @ p.weight], 2).flatten(1, 2)


@BLOCKS.block(weight="WW")
def empty_parts(p: Block, x: Tensor) -> Tensor:
    return torch.cat([x[:, :0], x @ p.weight, x[:, :0] * 2], 1) + x[:, :0].sum()


@BLOCKS.block(gain="1", weight="WW")
def scalar_tensors(p: Block, x: Tensor) -> Tensor:
    return x * p.gain.squeeze() + (x @ p.weight) / x.numel() + torch.tensor(0.5, dtype=x.dtype, device=x.device)


@BLOCKS.block(weight="WW")
def add_in_place(p: Block, x: Tensor) -> Tensor:
    y = x @ p.weight
    y += x
    return y.mul_(0.5).relu_()


@BLOCKS.block(weight="WW")
def row_in_place(p: Block, x: Tensor) -> Tensor:
    y = x @ p.weight
    y[:, 0] = y[:, 1] * 2
    y[..., -1] += x[..., 0]
    return y


@BLOCKS.block(weight="WW")
def view_in_place(p: Block, x: Tensor) -> Tensor:
    y = (x @ p.weight).clone()
    y.view(y.shape[0], -1)[:, ::3].mul_(2)
    y.mT[:, 0].tanh_()
    return y


@BLOCKS.block(weight="WW")
def copy_in_place(p: Block, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:].copy_(x[:, :-1] @ p.weight)
    y[:, :1].fill_(1.0)
    return y


@BLOCKS.block(weight="WW")
def masked_in_place(p: Block, x: Tensor) -> Tensor:
    y = x @ p.weight
    y[y.detach() < 0] = 0.1
    return y


@BLOCKS.block(weight="WW")
def diagonal_in_place(p: Block, x: Tensor) -> Tensor:
    square = p.weight.clone()
    square.diagonal().add_(1.0)
    return x @ square.tril()


@BLOCKS.block(weight="WW")
def orthogonal(p: Block, x: Tensor) -> Tensor:
    return x @ torch.linalg.matrix_exp((p.weight - p.weight.mT) * 0.1)


@BLOCKS.block(weight="WW")
def solve_system(p: Block, x: Tensor) -> Tensor:
    return torch.linalg.solve(torch.eye(p.width, dtype=x.dtype, device=x.device) * 4 + p.weight, x.mT).mT


@BLOCKS.block(weight="WW")
def spectral(p: Block, x: Tensor) -> Tensor:
    return x @ (p.weight / p.weight.norm())


@BLOCKS.block(weight="WW")
def standardized_weight(p: Block, x: Tensor) -> Tensor:
    return x @ ((p.weight - p.weight.mean(0)) / (p.weight.std(0) + 1e-3)) * 0.3


@BLOCKS.block(weight="WW")
def symmetric_by_vmap(p: Block, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row @ (p.weight + p.weight.mT))(x)


@BLOCKS.block(weight="HDD")
def heads_by_vmap(p: Block, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (p.heads, HEAD))
    return torch.vmap(torch.matmul, in_dims=(2, 0))(heads, p.weight).movedim(0, 2).flatten(2)


@BLOCKS.block(weight="WW")
def quantiles(p: Block, x: Tensor) -> Tensor:
    return x @ p.weight - x.median(-1, keepdim=True).values + x.kthvalue(2, 1, keepdim=True).values


@BLOCKS.block(weight="WW")
def reductions(p: Block, x: Tensor) -> Tensor:
    return x @ p.weight + x.logsumexp(1, True) + x.std((1, 2), keepdim=True) + x.sum(0) * 0.1 + x.prod(1, True)
